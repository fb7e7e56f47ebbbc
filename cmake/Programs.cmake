# fsdp_torch_program(target): what tests, examples and tools that include torch
# have in common. They share one precompiled header, so they must be compiled
# with the same flags; -O1 without debug information keeps it small and quick.

if(FSDP_BUILD_TESTS)
  include(FetchContent)
  FetchContent_Declare(
    googletest URL https://github.com/google/googletest/archive/v1.14.0.tar.gz
    FIND_PACKAGE_ARGS NAMES GTest)
  FetchContent_MakeAvailable(googletest)
endif()

# Position independence is left to the compiler's default: asked for, it is -fPIC
# for the carrier of the header and -fPIE for the programs, which do not match.
function(_fsdp_torch_flags target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_compile_options(${target} PRIVATE ${FSDP_PROGRAM_OPTIONS})
  target_compile_definitions(${target} PRIVATE NDEBUG)
  target_link_libraries(
    ${target} PRIVATE fsdp_warnings torch torch_library Threads::Threads)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  if(TARGET GTest::gtest)
    target_compile_definitions(
      ${target} PRIVATE $<TARGET_PROPERTY:GTest::gtest,INTERFACE_COMPILE_DEFINITIONS>)
    target_compile_options(
      ${target} PRIVATE $<TARGET_PROPERTY:GTest::gtest,INTERFACE_COMPILE_OPTIONS>)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_LAUNCHER)
    # ccache needs it to look into what includes a precompiled header.
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endif()
endfunction()

function(fsdp_torch_program target)
  _fsdp_torch_flags(${target})
  target_precompile_headers(${target} REUSE_FROM fsdp_torch_pch)
endfunction()

set(FSDP_PROGRAM_OPTIONS $<$<CONFIG:Release>:-O1>)
if(FSDP_USE_TORCH AND (FSDP_BUILD_TESTS OR FSDP_BUILD_EXAMPLES OR FSDP_BUILD_TOOLS))
  file(CONFIGURE OUTPUT torch_pch.cpp CONTENT "// Carries the precompiled header.\n")
  add_library(fsdp_torch_pch OBJECT "${CMAKE_CURRENT_BINARY_DIR}/torch_pch.cpp")
  _fsdp_torch_flags(fsdp_torch_pch)
  target_precompile_headers(fsdp_torch_pch PRIVATE <torch/torch.h>)
  if(TARGET GTest::gtest)
    target_link_libraries(fsdp_torch_pch PRIVATE GTest::gtest)
    target_precompile_headers(fsdp_torch_pch PRIVATE <gtest/gtest.h>)
  endif()
endif()
