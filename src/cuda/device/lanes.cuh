// SPDX-License-Identifier: Apache-2.0
// The place of a thread in its warp, and of its warp in the block; and how a lane reads a router's
// expert indices as the caller passed them.
#pragma once

#include <cstddef>
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

// Returns the unchecked expert of route token * topk + k, of `index_bytes` bytes.
__device__ __forceinline__ int64_t
given_expert(const void* topk_idx, int32_t index_bytes, size_t route) {
  return index_bytes == sizeof(int64_t) ? __ldg(static_cast<const long long*>(topk_idx) + route)
                                        : __ldg(static_cast<const int*>(topk_idx) + route);
}

}  // namespace weft
