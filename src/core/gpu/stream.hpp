// SPDX-License-Identifier: Apache-2.0
// Streams that have run something before they are handed out. The first work of a new stream may
// stay unseen by the GPU until kernels that run there have ended: if those are exchange kernels of
// other ranks that share the GPU, they wait for this very work, and all run into their deadline.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "core/context.hpp"

namespace weft {

// A stream that neither waits for the legacy default stream nor is waited for by it. It goes back
// to the process with the last copy of the object; work in it goes on.
class GpuStream {
 public:
  GpuStream() = default;
  // Makes many streams at a time, so that few are made while kernels run. Throws Error
  // kCuda.
  explicit GpuStream(int gpu);
  [[nodiscard]] cudaStream_t get() const { return stream_.get(); }

 private:
  std::shared_ptr<CUstream_st> stream_;
};

// The streams by which the host ends waits of kernels. What is queued behind such a kernel, in any
// stream of its hardware queue, waits with it. Streams of different priorities share no hardware
// queue, so that these have priorities of their own, above those that callers use.
enum class Urgency : uint8_t { kShortWork, kRepetition };

// Makes such a stream, which the caller owns. Throws Error kCuda.
[[nodiscard]] cudaStream_t make_urgent_stream(int gpu, Urgency urgency);

// Returns the process's stream for short work that waits for nothing: copies of some bytes, taking
// and freeing memory. All ranks that share the GPU as threads use it. Throws Error kCuda.
[[nodiscard]] cudaStream_t short_work_stream(int gpu);

// Makes streams if fewer than 16 are left to be taken, and that for short work. An exchange calls
// it while it is made: later on a peer on the same GPU may wait for this rank in a kernel, and that
// kernel may hold up the making of streams until its deadline. Throws Error kCuda.
void reserve_streams(int gpu);

// Waits for the work of the stream. Calls `look()`, which may throw, about every 25 ms meanwhile.
// Throws Error kCuda.
void wait_for_stream(
    cudaStream_t stream, const Context& context, const std::function<void()>& look
);

// Returns whether work for the stream becomes part of a graph instead. Throws Error (kCuda).
[[nodiscard]] bool is_capturing(cudaStream_t stream, const Context& context);

}  // namespace weft
