// SPDX-License-Identifier: Apache-2.0
#include "core/gpu/stream.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "core/clock.hpp"
#include "core/gpu/check.hpp"
#include "core/gpu/short_copies.hpp"

namespace weft {
namespace {

constexpr size_t kStreamsAtOnce = 32;
constexpr size_t kSpareStreams = 16;  // a guess

class StreamPool {
 public:
  // Takes the oldest free stream: so long as at most 32 are in use, each has a hardware queue of
  // its own, where the process allows 32 of them (CUDA_DEVICE_MAX_CONNECTIONS).
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

  [[nodiscard]] cudaStream_t make(int gpu, int priority) {
    const std::lock_guard lock(mutex_);
    const RelaxedCapture no_capture;
    const CudaDeviceGuard guard(gpu);
    cudaStream_t stream = nullptr;
    WEFT_CUDA(Context{}, cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
    begin(stream, streams_[gpu]);
    WEFT_CUDA(Context{}, cudaStreamSynchronize(stream));
    return stream;
  }

 private:
  // Streams of one GPU.
  struct Streams {
    std::vector<cudaStream_t> all;
    std::set<size_t> free;
    // Byte that new streams write once. It is kept: cudaFree would wait for every kernel of the
    // GPU, and such a kernel may wait for the rank that makes streams here.
    void* scratch = nullptr;
  };

  static void begin(cudaStream_t stream, Streams& streams) {
    if (streams.scratch == nullptr) {
      WEFT_CUDA(Context{}, cudaMalloc(&streams.scratch, 1));
    }
    WEFT_CUDA(Context{}, cudaMemsetAsync(streams.scratch, 0, 1, stream));
  }

  static void add_streams(int gpu, Streams& streams) {
    const RelaxedCapture no_capture;
    const CudaDeviceGuard guard(gpu);
    std::vector<cudaStream_t> added(kStreamsAtOnce);
    for (cudaStream_t& stream : added) {
      WEFT_CUDA(Context{}, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      begin(stream, streams);
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

cudaStream_t make_urgent_stream(int gpu, Urgency urgency) {
  const CudaDeviceGuard guard(gpu);
  int least = 0;  // a larger number than the greatest
  int greatest = 0;
  WEFT_CUDA(Context{}, cudaDeviceGetStreamPriorityRange(&least, &greatest));
  return pool().make(gpu, std::min(greatest + static_cast<int>(urgency), least));
}

cudaStream_t short_work_stream(int gpu) {
  static auto& streams = *new std::map<int, cudaStream_t>;  // used after static objects are gone
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto found = streams.find(gpu);
  if (found == streams.end()) {
    found = streams.emplace(gpu, make_urgent_stream(gpu, Urgency::kShortWork)).first;
  }
  return found->second;
}

void reserve_streams(int gpu) {
  pool().reserve(gpu);
  static_cast<void>(short_work_stream(gpu));
  reserve_short_copies();
}

void wait_for_stream(
    cudaStream_t stream, const Context& context, const std::function<void()>& look
) {
  constexpr auto kLookEvery = std::chrono::milliseconds(25);
  constexpr auto kShort = std::chrono::milliseconds(2);  // before that the thread only yields
  const RelaxedCapture no_capture;
  const auto begin = Clock::now();
  auto next_look = begin + kLookEvery;
  for (;;) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state != cudaErrorNotReady) {
      WEFT_CUDA(context, state);
      return;
    }
    static_cast<void>(cudaGetLastError());  // no later call must find this error
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
