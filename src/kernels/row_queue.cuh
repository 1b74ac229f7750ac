// SPDX-License-Identifier: Apache-2.0
// A warp's queue of row pieces on their way to where its lanes can add them: shared memory filled
// by the bulk copy engine.
#pragma once

#include "kernels/row_mover.cuh"

namespace weft {

inline constexpr int kQueueStages = 12;
inline constexpr int32_t kQueuePiece = 2048;

#if __CUDA_ARCH__ >= 900

class RowQueue {
 public:
  __device__ RowQueue(std::byte* stages, uint64_t* full) : stages_(stages), full_(full) {
    if (lane_index() == 0) {
      for (int stage = 0; stage < kQueueStages; ++stage) {
        ptx::init_barrier(full + stage);
      }
      ptx::publish_barriers();
    }
    __syncwarp();
  }

  [[nodiscard]] __device__ __forceinline__ bool is_full() const {
    return pushed_ - popped_ == kQueueStages;
  }

  // All lanes.
  __device__ __forceinline__ void push(const std::byte* data, int32_t bytes) {
    const uint32_t stage = pushed_++ % kQueueStages;
    if (lane_index() == 0) {
      ptx::bulk_load(
          stages_ + stage * kQueuePiece, data, static_cast<uint32_t>(bytes), full_ + stage
      );
    }
  }

  // The oldest piece, once it is here.
  [[nodiscard]] __device__ __forceinline__ const std::byte* front() {
    const uint32_t stage = popped_ % kQueueStages;
    while (!ptx::try_wait_barrier(full_ + stage, popped_ / kQueueStages % 2)) {
    }
    return stages_ + stage * kQueuePiece;
  }

  // No lane reads it any more.
  __device__ __forceinline__ void pop() {
    __syncwarp();
    ++popped_;
  }

 private:
  std::byte* stages_;
  uint64_t* full_;
  uint32_t pushed_ = 0;
  uint32_t popped_ = 0;
};

#endif

}  // namespace weft
