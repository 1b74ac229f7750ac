// SPDX-License-Identifier: Apache-2.0
// The place of a thread in its warp, and of its warp in the block.
#pragma once

#include <cstdint>

namespace weft {

inline constexpr int kWarpLanes = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffU;

__device__ __forceinline__ int lane_index() {
  return static_cast<int>(threadIdx.x) % kWarpLanes;
}

__device__ __forceinline__ int warp_in_block() {
  return static_cast<int>(threadIdx.x) / kWarpLanes;
}

}  // namespace weft
