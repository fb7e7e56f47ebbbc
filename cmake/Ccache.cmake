# Compiles through ccache. Its folder lies outside the tree, so that a fresh
# clone on the same machine starts warm; precompiled headers need the sloppiness.

if(FSDP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(FSDP_CCACHE_PROGRAM ccache)
  mark_as_advanced(FSDP_CCACHE_PROGRAM)
  if(FSDP_CCACHE_PROGRAM)
    if(DEFINED ENV{CCACHE_DIR})
      set(_ccache_dir "$ENV{CCACHE_DIR}")
    elseif(NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
      set(_ccache_dir "$ENV{XDG_CACHE_HOME}/libfsdp/ccache")
    else()
      set(_ccache_dir "$ENV{HOME}/.cache/libfsdp/ccache")
    endif()
    set(CMAKE_CXX_COMPILER_LAUNCHER
        env "CCACHE_DIR=${_ccache_dir}" "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}"
        CCACHE_NOHASHDIR=1 CCACHE_MAXSIZE=5G
        CCACHE_SLOPPINESS=pch_defines,time_macros "${FSDP_CCACHE_PROGRAM}")
  endif()
endif()
