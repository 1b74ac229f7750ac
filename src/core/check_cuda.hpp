// SPDX-License-Identifier: Apache-2.0
// Checks of CUDA calls; only files of the CUDA parts include it.
#pragma once

#include <cuda_runtime_api.h>

#include "core/context.hpp"

namespace weft {

// Throws Error (kOutOfMemory or kCuda): "<expression>: <CUDA's text> (<CUDA's name>)". The last two
// stand for the caller's place.
[[noreturn]] void raise_cuda_error(
    cudaError_t status,
    const char* expression,
    const Context& context,
    const char* file = __builtin_FILE(),
    int line = __builtin_LINE()
);

}  // namespace weft

// A CUDA call that must succeed.
#define WEFT_CUDA(context, expr)                                    \
  do {                                                              \
    const cudaError_t weft_cuda_status = (expr);                    \
    if (weft_cuda_status != cudaSuccess) [[unlikely]] {             \
      ::weft::raise_cuda_error(weft_cuda_status, #expr, (context)); \
    }                                                               \
  } while (false)
