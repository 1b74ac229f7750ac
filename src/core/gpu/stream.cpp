// SPDX-License-Identifier: Apache-2.0
#include "core/gpu/stream.hpp"

#include <map>
#include <mutex>
#include <set>
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
  // The oldest that is free: so long as at most 32 are in use, each has a hardware queue of its
  // own, where the process allows 32 of them (CUDA_DEVICE_MAX_CONNECTIONS).
  [[nodiscard]] std::shared_ptr<CUstream_st> take(int gpu) {
    const std::lock_guard lock(mutex_);
    Streams& streams = streams_[gpu];
    if (streams.free.empty()) {
      add_streams(gpu, streams);
    }
    const size_t index = *streams.free.begin();
    streams.free.erase(streams.free.begin());
    return {streams.all[index], [this, &streams, index](CUstream_st* /*stream*/) {
              const std::lock_guard give_back(mutex_);
              streams.free.insert(index);
            }};
  }

  void reserve(int gpu) {
    const std::lock_guard lock(mutex_);
    if (Streams& streams = streams_[gpu]; streams.free.size() < kSpareStreams) {
      add_streams(gpu, streams);
    }
  }

 private:
  // Of one GPU.
  struct Streams {
    std::vector<cudaStream_t> all;
    std::set<size_t> free;
    // What new streams write once. It is kept: cudaFree would wait for every kernel of the GPU, and
    // such a kernel may wait for the rank that makes streams here.
    void* scratch = nullptr;
  };

  static void add_streams(int gpu, Streams& streams) {
    const RelaxedCapture no_capture;
    const CudaDeviceGuard guard(gpu);
    if (streams.scratch == nullptr) {
      WEFT_CUDA(Context{}, cudaMalloc(&streams.scratch, 1));
    }
    std::vector<cudaStream_t> added(kStreamsAtOnce);
    for (cudaStream_t& stream : added) {
      WEFT_CUDA(Context{}, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      WEFT_CUDA(Context{}, cudaMemsetAsync(streams.scratch, 0, 1, stream));
    }
    for (const cudaStream_t stream : added) {
      WEFT_CUDA(Context{}, cudaStreamSynchronize(stream));
      streams.free.insert(streams.all.size());
      streams.all.push_back(stream);
    }
  }

  std::mutex mutex_;
  std::map<int, Streams> streams_;  // by GPU
};

StreamPool& pool() {
  static auto& instance = *new StreamPool;  // never destroyed: streams may outlive static objects
  return instance;
}

}  // namespace

GpuStream::GpuStream(int gpu) : stream_(pool().take(gpu)) {}

cudaStream_t short_work_stream(int gpu) {
  static auto& streams = *new std::map<int, GpuStream>;  // memory may be freed after static objects
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto found = streams.find(gpu);
  if (found == streams.end()) {
    found = streams.emplace(gpu, GpuStream(gpu)).first;
  }
  return found->second.get();
}

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
