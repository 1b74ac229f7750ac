// SPDX-License-Identifier: Apache-2.0
// Checks of CUDA calls; only files of the CUDA parts include it.
#pragma once

#include <cuda_runtime_api.h>

#include "core/check.hpp"

namespace weft {

// Throws Error (kOutOfMemory or kCuda): "<expression>: <CUDA's text> (<CUDA's name>)".
inline void check_cuda(
    cudaError_t status,
    const char* expression,
    const Context& context,
    const char* file = __builtin_FILE(),
    int line = __builtin_LINE()
) {
  if (status == cudaSuccess) [[likely]] {
    return;
  }
  static_cast<void>(cudaGetLastError());  // leave no error behind for the next call
  raise_error(
      status == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kCuda,
      context,
      fmt::format("{}: {} ({})", expression, cudaGetErrorString(status), cudaGetErrorName(status)),
      file,
      line
  );
}

}  // namespace weft

#define WEFT_CUDA(context, expr) ::weft::check_cuda((expr), #expr, (context))
