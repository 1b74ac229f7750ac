// SPDX-License-Identifier: Apache-2.0
// Which ranks take no rows since they are lost: LocalState::lost as balancing reads it.
#pragma once

#include <cstdint>

#include "cuda/device/lanes.cuh"

namespace weft {

// `lost`: of a launch. A bit for each of the first 32 ranks; more are only simulated.
__device__ __forceinline__ uint32_t load_lost(const uint32_t* lost) {
  return lost == nullptr ? 0 : *lost;
}

__device__ __forceinline__ bool is_lost_rank(uint32_t lost, int rank) {
  return rank < kWarpLanes && (lost >> rank & 1U) != 0;
}

}  // namespace weft
