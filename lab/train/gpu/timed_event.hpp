// SPDX-License-Identifier: Apache-2.0
// A point in a stream of which the time is taken. Nobody waits for it on the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/gpu/check.hpp"

namespace weft {

class TimedEvent {
 public:
  TimedEvent() { WEFT_CUDA(Context{}, cudaEventCreate(&event_)); }
  ~TimedEvent() { static_cast<void>(cudaEventDestroy(event_)); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;

  void record(cudaStream_t stream) const { WEFT_CUDA(Context{}, cudaEventRecord(event_, stream)); }
  void make_wait(cudaStream_t stream) const {
    WEFT_CUDA(Context{}, cudaStreamWaitEvent(stream, event_));
  }
  [[nodiscard]] double ms_after(const TimedEvent& start) const {
    float ms = 0;
    WEFT_CUDA(Context{}, cudaEventElapsedTime(&ms, start.event_, event_));
    return static_cast<double>(ms);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace weft
