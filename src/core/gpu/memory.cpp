// SPDX-License-Identifier: Apache-2.0
// Stream-ordered memory: cudaFree would wait for every kernel on the GPU, those of other ranks too.
#include <limits>

#include "core/gpu/check.hpp"
#include "core/gpu/device_memory.hpp"
#include "core/gpu/stream.hpp"

namespace weft {
namespace {

// Freed memory stays with the process, so that no later call waits for the driver.
void keep_memory(int gpu) {
  cudaMemPool_t pool = nullptr;
  uint64_t threshold = std::numeric_limits<uint64_t>::max();
  WEFT_CUDA(Context{}, cudaDeviceGetDefaultMemPool(&pool, gpu));
  WEFT_CUDA(Context{}, cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
}

}  // namespace

std::shared_ptr<std::byte> allocate_on_gpu(int gpu, uint64_t bytes) {
  WEFT_CUDA(Context{}, cudaSetDevice(gpu));
  keep_memory(gpu);
  const cudaStream_t stream = short_work_stream(gpu);
  void* data = nullptr;
  WEFT_CUDA(Context{}, cudaMallocAsync(&data, bytes, stream));
  WEFT_CUDA(Context{}, cudaStreamSynchronize(stream));
  return {static_cast<std::byte*>(data), [gpu, stream](std::byte* memory) {
            if (cudaSetDevice(gpu) == cudaSuccess) {
              static_cast<void>(cudaFreeAsync(memory, stream));
            }
          }};
}

void copy_by_gpu(int gpu, std::byte* to, const std::byte* from, uint64_t bytes) {
  WEFT_CUDA(Context{}, cudaSetDevice(gpu));
  const cudaStream_t stream = short_work_stream(gpu);
  WEFT_CUDA(Context{}, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
  WEFT_CUDA(Context{}, cudaStreamSynchronize(stream));
}

}  // namespace weft
