// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include "core/check_cuda.hpp"
#include "support/stream.hpp"

namespace weft::test {

TestStream::TestStream(const Device& device) : device_(device) {
  WEFT_CUDA(Context{}, cudaSetDevice(device.index));
  cudaStream_t stream = nullptr;
  WEFT_CUDA(Context{}, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  stream_ = {stream, [gpu = device.index](void* own) {
               if (cudaSetDevice(gpu) == cudaSuccess) {
                 static_cast<void>(cudaStreamSynchronize(static_cast<cudaStream_t>(own)));
                 static_cast<void>(cudaStreamDestroy(static_cast<cudaStream_t>(own)));
               }
             }};
}

void TestStream::wait() const {
  WEFT_CUDA(Context{}, cudaSetDevice(device_.index));
  WEFT_CUDA(Context{}, cudaStreamSynchronize(static_cast<cudaStream_t>(stream_.get())));
}

}  // namespace weft::test
