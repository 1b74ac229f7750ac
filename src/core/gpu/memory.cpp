// SPDX-License-Identifier: Apache-2.0
// Stream-ordered memory: cudaFree would wait for every kernel on the GPU, those of other ranks too.
#include <limits>
#include <map>
#include <mutex>

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

// Not the thread's: a new thread's stream is a new one (stream.hpp). Only short work is in it.
cudaStream_t memory_stream(int gpu) {
  static auto& streams = *new std::map<int, GpuStream>;  // freeing may outlive static objects
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto found = streams.find(gpu);
  if (found == streams.end()) {
    found = streams.emplace(gpu, GpuStream(gpu)).first;
  }
  return found->second.get();
}

}  // namespace

std::shared_ptr<std::byte> allocate_on_gpu(int gpu, uint64_t bytes) {
  WEFT_CUDA(Context{}, cudaSetDevice(gpu));
  keep_memory(gpu);
  const cudaStream_t stream = memory_stream(gpu);
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
  const cudaStream_t stream = memory_stream(gpu);
  WEFT_CUDA(Context{}, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
  WEFT_CUDA(Context{}, cudaStreamSynchronize(stream));
}

}  // namespace weft
