// SPDX-License-Identifier: Apache-2.0
#include "core/gpu/check.hpp"

#include "core/check.hpp"
#include "core/log.hpp"

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

void log_not_given_back(std::string_view what, cudaError_t status) {
  if (status != cudaSuccess && status != cudaErrorCudartUnloading) {
    log(LogLevel::kDebug, "{}: not given back: {}", what, cudaGetErrorString(status));
  }
}

}  // namespace weft
