# SPDX-License-Identifier: Apache-2.0
# What most tests include, compiled once: it is two fifths of the time that a test's source takes. More
# headers here make it slower again, since all of it is read for each source.
function(weft_precompile_test_headers)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/test_headers.cpp)
  file(CONFIGURE OUTPUT ${source} CONTENT "int main() {}\n")
  add_executable(weft_test_headers EXCLUDE_FROM_ALL ${source})
  target_link_libraries(weft_test_headers PRIVATE weft weft_flags fmt::fmt GTest::gtest)
  target_precompile_headers(weft_test_headers PRIVATE
    <gtest/gtest.h> <fmt/format.h> <algorithm> <filesystem> <fstream> <functional> <thread>)
endfunction()

# weft_test(NAME file.cpp ... [LIBS ...] [LABELS ...] [ENV NAME=value ...] [TIMEOUT seconds]): one
# program, one CTest entry per case; sees private headers.
function(weft_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "LIBS;LABELS;ENV" ${ARGN})
  add_executable(${name} ${ARG_UNPARSED_ARGUMENTS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE weft weft_flags fmt::fmt nlohmann_json::nlohmann_json
                        GTest::gtest GTest::gtest_main ${ARG_LIBS})
  target_precompile_headers(${name} REUSE_FROM weft_test_headers)
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(CMAKE_CURRENT_SOURCE_DIR MATCHES "/tests/unit/")
    list(APPEND ARG_LABELS unit)
    list(REMOVE_DUPLICATES ARG_LABELS)
    add_dependencies(weft_unit_tests ${name})
  endif()
  set(properties TIMEOUT ${ARG_TIMEOUT})  # an empty value would take the next name for its own
  if(ARG_ENV)
    list(APPEND properties ENVIRONMENT "${ARG_ENV}")
  endif()
  if(ARG_LABELS)
    list(APPEND properties LABELS "${ARG_LABELS}")
  endif()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES ${properties})
endfunction()

# weft_fuzz(NAME file.cpp ... [SECONDS n]): a libFuzzer target, run for so long; the corpus folder
# beside the CMakeLists.txt, if there is one, seeds it. The seed is fixed so that a failure repeats.
function(weft_fuzz name)
  cmake_parse_arguments(ARG "" "SECONDS" "LIBS" ${ARGN})
  if(NOT ARG_SECONDS)
    set(ARG_SECONDS 20)
  endif()
  add_executable(${name} ${ARG_UNPARSED_ARGUMENTS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE weft weft_flags fmt::fmt nlohmann_json::nlohmann_json ${ARG_LIBS})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  set(found ${CMAKE_CURRENT_BINARY_DIR}/${name}_found)
  file(MAKE_DIRECTORY ${found})
  set(corpus "")
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/corpus/${name})
    set(corpus ${CMAKE_CURRENT_SOURCE_DIR}/corpus/${name})
  endif()
  add_test(NAME ${name} COMMAND ${name} -seed=1 -max_total_time=${ARG_SECONDS} -timeout=10
           -rss_limit_mb=2048 -print_final_stats=1 ${found} ${corpus})
  math(EXPR limit "${ARG_SECONDS} + 60")
  set_tests_properties(${name} PROPERTIES TIMEOUT ${limit} LABELS fuzz)
endfunction()

# Every source is named by a CMakeLists.txt of its folder or of one above; a forgotten one would be a
# test that never runs. bench makes some of its names.
function(weft_check_sources_are_listed)
  foreach(top src apps lab examples tests)
    file(GLOB_RECURSE sources ${PROJECT_SOURCE_DIR}/${top}/*.cpp ${PROJECT_SOURCE_DIR}/${top}/*.cu)
    foreach(source ${sources})
      cmake_path(GET source FILENAME name)
      cmake_path(GET source PARENT_PATH folder)
      set(lists "")
      while(NOT folder STREQUAL PROJECT_SOURCE_DIR)
        if(EXISTS ${folder}/CMakeLists.txt)
          file(STRINGS ${folder}/CMakeLists.txt lines)
          list(APPEND lists ${lines})
        endif()
        cmake_path(GET folder PARENT_PATH folder)
      endwhile()
      if(NOT "${lists}" MATCHES "[ /(;]${name}")
        message(FATAL_ERROR "${source} is named by no CMakeLists.txt")
      endif()
    endforeach()
  endforeach()
endfunction()
