// SPDX-License-Identifier: Apache-2.0
// Zeroes the rows between an expert's last row and the end of its padded block, which dispatch does
// not write. fan_out.cuh and eager.cuh call it.
#pragma once

#include "cuda/device/lanes.cuh"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// One warp.
__device__ __forceinline__ void zero_row(const DispatchLaunch& call, int64_t row) {
  const int lane = lane_index();
  const int64_t row_bytes = call.payload.out_row_bytes();
  std::byte* out = call.out_rows + row * row_bytes;
  for (int64_t at = lane * 16; at < row_bytes; at += kWarpLanes * 16) {
    ptx::store_16(out + at, uint4{0, 0, 0, 0});
  }
  if (call.out_weights != nullptr && lane == 0) {
    call.out_weights[row] = 0;
  }
  if (call.out_scales != nullptr) {
    for (int64_t at = lane; at < call.payload.scale_bytes; at += kWarpLanes) {
      call.out_scales[row * call.payload.scale_bytes + at] = std::byte{0};
    }
  }
}

// One of `num_warps` warps: its share.
__device__ inline void zero_padding(const DispatchLaunch& call, int warp, int num_warps) {
  if (!call.has_padding) {
    return;
  }
  const PlanView& plan = call.plan;
  const int num_experts = static_cast<int>(call.me.map.num_experts) / call.me.num_ranks;
  for (int first = 0; first < num_experts; first += kWarpLanes) {
    // Lane i knows expert first + i.
    const int expert = first + lane_index();
    int32_t begin = 0;
    int32_t count = 0;
    if (expert < num_experts) {
      const int64_t rows = plan.rows_per_expert()[expert];
      begin = static_cast<int32_t>(plan.expert_begin()[expert] + rows);
      count = static_cast<int32_t>(plan.padded_rows_per_expert()[expert] - rows);
    }
    uint32_t left = __ballot_sync(kAllLanes, count > 0);
    while (left != 0) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      const int32_t from = __shfl_sync(kAllLanes, begin, lane);
      const int32_t rows = __shfl_sync(kAllLanes, count, lane);
      // Each expert begins with another warp, so that the first warps do not do all the work. The
      // stride of 37 is a guess.
      for (int row = (warp + (first + lane) * 37) % num_warps; row < rows; row += num_warps) {
        zero_row(call, from + row);
      }
    }
  }
}

}  // namespace weft
