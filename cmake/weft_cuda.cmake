# SPDX-License-Identifier: Apache-2.0
# Sets WEFT_HAS_CUDA. Folders with CUDA parts pick the x_cuda or the x_none file by it.
set(WEFT_HAS_CUDA OFF)
if(WEFT_CUDA STREQUAL "OFF")
  weft_note("CUDA: off, device listing and device code are left out (preset cuda turns it on)")
  return()
endif()

find_program(WEFT_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME PATH_SUFFIXES bin PATHS /usr/local/cuda/bin)
if(NOT WEFT_NVCC)
  if(NOT WEFT_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "WEFT_CUDA=${WEFT_CUDA}, but nvcc was not found (WEFT_NVCC can name it)")
  endif()
  weft_note("CUDA: nvcc not found, device listing and device code are left out")
  return()
endif()

set(CMAKE_CUDA_COMPILER ${WEFT_NVCC} CACHE FILEPATH "nvcc")
set(CMAKE_CUDA_ARCHITECTURES "80-real;90a-real;100a-real" CACHE STRING
    "GPU architectures; here: of this machine's GPUs, or 90 if it has none")
set(note "")
if(CMAKE_CUDA_ARCHITECTURES STREQUAL "here")
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE found ERROR_QUIET RESULT_VARIABLE status)
  if(NOT status EQUAL 0 OR NOT found)
    set(found 9.0)
  endif()
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${found}")
  list(REMOVE_DUPLICATES found)
  list(TRANSFORM found REPLACE "([0-9]+)\\.([0-9])" "\\1\\2-real")
  set(CMAKE_CUDA_ARCHITECTURES ${found})
  set(note " alone (CMAKE_CUDA_ARCHITECTURES names others)")
endif()
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc speaks C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>")
# nvcc calls a conversion useless in the class for which its `requires` takes it away.
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-diag-suppress=554>")
find_package(CUDAToolkit REQUIRED)
set(WEFT_HAS_CUDA ON)
list(JOIN CMAKE_CUDA_ARCHITECTURES ", " architectures)
weft_note("CUDA ${CMAKE_CUDA_COMPILER_VERSION}: for ${architectures}${note}")
