// SPDX-License-Identifier: Apache-2.0
#include "core/gpu/stream.hpp"

#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "core/clock.hpp"
#include "core/gpu/check.hpp"

namespace weft {
namespace {

constexpr size_t kStreamsAtOnce = 32;
constexpr size_t kSpareStreams = 16;  // a guess

class StreamPool {
 public:
  // The one that was given back longest ago.
  [[nodiscard]] cudaStream_t take(int gpu) {
    const std::lock_guard lock(mutex_);
    auto& free = free_[gpu];
    if (free.empty()) {
      add_streams(gpu, free);
    }
    const cudaStream_t stream = free.front();
    free.pop_front();
    return stream;
  }

  void reserve(int gpu) {
    const std::lock_guard lock(mutex_);
    auto& free = free_[gpu];
    if (free.size() < kSpareStreams) {
      add_streams(gpu, free);
    }
  }

  void give_back(int gpu, cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    free_[gpu].push_back(stream);
  }

 private:
  void add_streams(int gpu, std::deque<cudaStream_t>& free) {
    const RelaxedCapture no_capture;
    const CudaDeviceGuard guard(gpu);
    void*& scratch = scratch_[gpu];
    if (scratch == nullptr) {
      WEFT_CUDA(Context{}, cudaMalloc(&scratch, kStreamsAtOnce));
    }
    std::vector<cudaStream_t> added(kStreamsAtOnce);
    for (size_t i = 0; i < kStreamsAtOnce; ++i) {
      WEFT_CUDA(Context{}, cudaStreamCreateWithFlags(&added[i], cudaStreamNonBlocking));
      WEFT_CUDA(Context{}, cudaMemsetAsync(static_cast<std::byte*>(scratch) + i, 0, 1, added[i]));
    }
    for (const cudaStream_t stream : added) {
      WEFT_CUDA(Context{}, cudaStreamSynchronize(stream));
    }
    free.insert(free.end(), added.begin(), added.end());
  }

  std::mutex mutex_;
  std::map<int, std::deque<cudaStream_t>> free_;  // by GPU
  // What new streams write once, by GPU. It is kept: cudaFree would wait for every kernel of the
  // GPU, and such a kernel may wait for the rank that makes streams here.
  std::map<int, void*> scratch_;
};

StreamPool& pool() {
  static auto& instance = *new StreamPool;  // never destroyed: streams may outlive static objects
  return instance;
}

}  // namespace

GpuStream::GpuStream(int gpu)
    : stream_(pool().take(gpu), [gpu](CUstream_st* stream) { pool().give_back(gpu, stream); }) {}

void reserve_streams(int gpu) {
  pool().reserve(gpu);
}

void wait_for_stream(
    cudaStream_t stream, const Context& context, const std::function<void()>& look
) {
  constexpr auto kLookEvery = std::chrono::milliseconds(25);
  constexpr auto kShort = std::chrono::milliseconds(2);  // below it nobody sleeps
  const RelaxedCapture no_capture;
  const auto begin = Clock::now();
  auto next_look = begin + kLookEvery;
  for (;;) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state != cudaErrorNotReady) {
      WEFT_CUDA(context, state);
      return;
    }
    static_cast<void>(cudaGetLastError());  // it is no error of whoever asks next
    const auto now = Clock::now();
    if (now >= next_look) {
      look();
      next_look = now + kLookEvery;
    } else if (now - begin < kShort) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

bool is_capturing(cudaStream_t stream, const Context& context) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  WEFT_CUDA(context, cudaStreamIsCapturing(stream, &capture));
  return capture != cudaStreamCaptureStatusNone;
}

}  // namespace weft
