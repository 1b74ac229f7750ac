# SPDX-License-Identifier: Apache-2.0
option(WEFT_TESTS "Build the tests" ON)
option(WEFT_PROGRAM "Build the program weft" ON)
option(WEFT_LAB "Build the laboratory: the trainer, the simulator and the program weft-lab" OFF)
option(WEFT_BENCH "Build the benchmarks" ON)
option(WEFT_PYTHON_MODULE "Build the Python module weft._core (needs nanobind, from PyPI)" OFF)
option(WEFT_FUZZ "Build the fuzz targets and only those tests (needs clang)" OFF)
option(WEFT_ASSERT "Check internal invariants" ON)
set(WEFT_CUDA "OFF" CACHE STRING "CUDA parts: OFF, AUTO (when nvcc is found) or ON (nvcc required)")
set(WEFT_SANITIZE "" CACHE STRING "Sanitizers, as for -fsanitize= (address,undefined or thread)")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()
# By its dependencies: nvcc preprocesses several architectures as one, so that ccache would not see a
# change in what only the others compile.
if(CCACHE_PROGRAM AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_DEPEND=1 ${CCACHE_PROGRAM})
endif()

# Flags of our own targets only. Contraction is off because sums must be the same bits on every machine.
add_library(weft_flags INTERFACE)
set(flags -Wall -Wextra -Wshadow -Wconversion -Werror -ffp-contract=off)
# GCC 12 sees uninitialised members where libraries are inlined deep.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND flags -Wno-maybe-uninitialized)
endif()
target_compile_options(weft_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${flags}>")
if(WEFT_ASSERT)
  target_compile_definitions(weft_flags INTERFACE WEFT_ENABLE_ASSERT)
endif()
if(WEFT_SANITIZE)
  add_compile_options(-fsanitize=${WEFT_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${WEFT_SANITIZE})
  if(WEFT_FUZZ)
    add_compile_options(-fsanitize=fuzzer-no-link)
  endif()
endif()
