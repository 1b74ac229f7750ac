// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include "core/gpu/check.hpp"
#include "core/gpu/stream.hpp"
#include "support/stream.hpp"

namespace weft::test {

TestStream::TestStream(const Device& device) : device_(device) {
  WEFT_CUDA(Context{}, cudaSetDevice(device.index));
  const GpuStream own(device.index);
  stream_ = {own.get(), [own](void* stream) {
               static_cast<void>(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
             }};
}

void TestStream::wait() const {
  WEFT_CUDA(Context{}, cudaSetDevice(device_.index));
  WEFT_CUDA(Context{}, cudaStreamSynchronize(static_cast<cudaStream_t>(stream_.get())));
}

}  // namespace weft::test
