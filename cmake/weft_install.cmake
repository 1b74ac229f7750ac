# SPDX-License-Identifier: Apache-2.0
# What is installed. find_package(weft) gives weft::weft; tests/install builds a project against it.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# The library with its headers, and the program.
function(weft_install_library)
  set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/weft)
  set(config ${PROJECT_BINARY_DIR}/weft-config.cmake)
  set(version ${PROJECT_BINARY_DIR}/weft-config-version.cmake)
  install(TARGETS weft EXPORT weft-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/weft DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT weft-targets NAMESPACE weft:: DESTINATION ${package_dir})
  configure_package_config_file(
    ${PROJECT_SOURCE_DIR}/cmake/weft-config.cmake.in ${config} INSTALL_DESTINATION ${package_dir})
  write_basic_package_version_file(${version} COMPATIBILITY SameMinorVersion)
  install(FILES ${config} ${version} DESTINATION ${package_dir})
  if(TARGET weft_program)
    install(TARGETS weft_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endfunction()

# A wheel: python/weft (by pyproject.toml) and these. tests/python/core/test_package.py compares.
function(weft_install_wheel)
  install(TARGETS weft_core LIBRARY DESTINATION weft COMPONENT python)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/_build_version.py DESTINATION weft COMPONENT python)
endfunction()
