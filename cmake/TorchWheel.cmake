# fsdp_find_torch(): makes the targets torch and torch_library.
#
# The libtorch is taken from the Python environment FSDP_TORCH_VENV or else from
# Torch_DIR or CMAKE_PREFIX_PATH. The TorchConfig.cmake of a CUDA wheel stops
# where no CUDA toolkit is installed, although a program that only links
# libtorch needs none. FSDP_TORCH_IMPORT says who makes the targets:
#   ON    this file, from the libraries in the package; no toolkit is looked for
#   OFF   find_package(Torch)
#   AUTO  this file for a CUDA package where nvcc is not found, else OFF

set(FSDP_TORCH_VENV "" CACHE PATH "Python environment whose torch package is used")
set(FSDP_TORCH_IMPORT AUTO CACHE STRING
  "Make the torch targets without TorchConfig.cmake: ON, OFF or AUTO")
mark_as_advanced(FSDP_TORCH_IMPORT)

function(_fsdp_locate_torch out)
  set(hints)
  if(FSDP_TORCH_VENV)
    file(GLOB hints "${FSDP_TORCH_VENV}/lib/python3*/site-packages/torch")
    if(NOT hints)
      message(FATAL_ERROR
        "FSDP_TORCH_VENV is ${FSDP_TORCH_VENV}, which has no torch package. "
        "Run scripts/setup.sh, or set Torch_DIR instead.")
    endif()
    set(only_hints NO_DEFAULT_PATH)
  else()
    foreach(config_dir "${Torch_DIR}" "$ENV{Torch_DIR}")
      if(config_dir)
        list(APPEND hints "${config_dir}/../../..")
      endif()
    endforeach()
    set(only_hints)
  endif()
  find_path(prefix share/cmake/Torch/TorchConfig.cmake
    HINTS ${hints} NO_CACHE ${only_hints})
  if(NOT prefix)
    message(FATAL_ERROR
      "libtorch was not found. Set Torch_DIR, CMAKE_PREFIX_PATH or FSDP_TORCH_VENV.")
  endif()
  get_filename_component(prefix "${prefix}" REALPATH)
  set(${out} "${prefix}" PARENT_SCOPE)
endfunction()

function(_fsdp_must_import_torch prefix out)
  set(${out} "${FSDP_TORCH_IMPORT}" PARENT_SCOPE)
  if(FSDP_TORCH_IMPORT STREQUAL "AUTO")
    set(${out} OFF PARENT_SCOPE)
    find_program(nvcc nvcc NO_CACHE PATH_SUFFIXES bin
      HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda)
    if(EXISTS "${prefix}/lib/libtorch_cuda.so" AND NOT nvcc)
      set(${out} ON PARENT_SCOPE)
    endif()
  endif()
endfunction()

# The names and definitions are those of the package's own Caffe2Targets.cmake.
function(_fsdp_import_torch prefix)
  set(libraries c10 torch_cpu)
  if(EXISTS "${prefix}/lib/libtorch_cuda.so")
    list(APPEND libraries c10_cuda torch_cuda)
  endif()
  foreach(name IN LISTS libraries)
    add_library(${name} SHARED IMPORTED)
    set_target_properties(${name} PROPERTIES
      IMPORTED_LOCATION "${prefix}/lib/lib${name}.so")
    target_include_directories(${name} SYSTEM INTERFACE
      "${prefix}/include" "${prefix}/include/torch/csrc/api/include")
  endforeach()
  target_compile_definitions(torch_cpu INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
  if(TARGET torch_cuda)
    target_compile_definitions(torch_cuda INTERFACE USE_C10D_NCCL)
  endif()

  add_library(torch SHARED IMPORTED)
  set_target_properties(torch PROPERTIES
    IMPORTED_LOCATION "${prefix}/lib/libtorch.so")
  # torch_cuda registers itself when it is loaded: no symbol of it is named.
  target_link_options(torch INTERFACE LINKER:--no-as-needed)
  target_link_libraries(torch INTERFACE ${libraries})
  add_library(torch_library INTERFACE IMPORTED)
  target_link_libraries(torch_library INTERFACE torch)
endfunction()

# A wheel keeps CUDA's libraries in neighbouring packages. Without this the
# linker resolves them from the system, where an older NCCL may be first.
function(_fsdp_add_rpath_link prefix)
  file(GLOB folders "${prefix}/../nvidia/*/lib")
  list(TRANSFORM folders PREPEND "LINKER:-rpath-link,")
  target_link_options(torch INTERFACE ${folders} "LINKER:-rpath-link,${prefix}/lib")
endfunction()

# A macro, because find_package(Torch) sets variables for its caller.
macro(fsdp_find_torch)
  if(NOT TARGET torch)
    _fsdp_locate_torch(_fsdp_torch_prefix)
    _fsdp_must_import_torch("${_fsdp_torch_prefix}" _fsdp_torch_import)
    if(_fsdp_torch_import)
      _fsdp_import_torch("${_fsdp_torch_prefix}")
      message(STATUS "Found torch: ${_fsdp_torch_prefix}")
    else()
      find_package(Torch REQUIRED
        PATHS "${_fsdp_torch_prefix}/share/cmake/Torch" NO_DEFAULT_PATH)
    endif()
    _fsdp_add_rpath_link("${_fsdp_torch_prefix}")
  endif()
endmacro()
