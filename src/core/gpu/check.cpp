// SPDX-License-Identifier: Apache-2.0
#include "core/check_cuda.hpp"

#include "core/check.hpp"

namespace weft {

void raise_cuda_error(
    cudaError_t status, const char* expression, const Context& context, const char* file, int line
) {
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
