// SPDX-License-Identifier: Apache-2.0
// Each lane is a CUDA stream; callbacks enqueue their work on LaneContext::stream.
#pragma once

#include <cuda_runtime_api.h>

#include <array>

#include "train/lanes/schedule.hpp"

namespace weft::overlap {

class StreamExecutor final : public Executor {
 public:
  // Two streams of one GPU, which must outlive it. An exchange stream of higher priority gets free
  // multiprocessors first.
  StreamExecutor(cudaStream_t compute, cudaStream_t exchange) : streams_{compute, exchange} {}

  // Calls every callback from this thread, in the order of issue; waits between the lanes become
  // events of the streams. A release is called when its step has been enqueued: memory must go back
  // in the order of the lane's stream. Returns when both streams are through;
  // spans are those of the GPU. Throws Error (kCuda), and what callbacks throw.
  Trace run(const Schedule& schedule) override;

 private:
  std::array<cudaStream_t, kNumLanes> streams_;  // by lane
};

}  // namespace weft::overlap
