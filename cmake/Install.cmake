# Install rules: headers, library, tool, and the package that find_package reads.

include(CMakePackageConfigHelpers)
set(_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/fsdp")

install(DIRECTORY include/fsdp DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.h")
install(TARGETS fsdp EXPORT fsdpTargets)
if(FSDP_BUILD_TOOLS)
  install(TARGETS fsdp_tool)
endif()
install(EXPORT fsdpTargets NAMESPACE fsdp:: DESTINATION "${_package_dir}")

configure_package_config_file(
  cmake/fsdpConfig.cmake.in "${PROJECT_BINARY_DIR}/fsdpConfig.cmake"
  INSTALL_DESTINATION "${_package_dir}")
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(
  FILES "${PROJECT_BINARY_DIR}/fsdpConfig.cmake"
        "${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake" cmake/TorchWheel.cmake
  DESTINATION "${_package_dir}")
