// SPDX-License-Identifier: Apache-2.0
// State of each rank in the kernels of balancing, a rank in a lane of a warp: which ones are lost,
// and where the places of an expert are.
#pragma once

#include <cstdint>

#include "cuda/device/lanes.cuh"
#include "plan/balance/balance.hpp"

namespace weft {

// Returns LocalState::lost, given a launch's `lost`: a bit for each of the first 32 ranks; more are
// only simulated.
__device__ __forceinline__ uint32_t load_lost(const uint32_t* lost) {
  return lost == nullptr ? 0 : *lost;
}

__device__ __forceinline__ bool is_lost_rank(uint32_t lost, int rank) {
  return rank < kWarpLanes && (lost >> rank & 1U) != 0;
}

// A value of each rank, spread over the lanes of a warp: lane l has those of ranks l and l + 32.
template <int kPerLane>
struct OfRanks {
  int32_t of[kPerLane] = {};

  [[nodiscard]] static __device__ int rank(int k) { return lane_index() + k * kWarpLanes; }
};

// Returns the lowest rank for which is_it() holds; there is one. is_it(k) asks for the lane's k-th
// rank.
template <int kPerLane, class IsIt>
__device__ __forceinline__ int lowest_rank(const IsIt& is_it) {
  int lowest = -1;
#pragma unroll
  for (int k = kPerLane - 1; k >= 0; --k) {
    const uint32_t lanes = __ballot_sync(kAllLanes, is_it(k));
    lowest = lanes != 0 ? k * kWarpLanes + __ffs(static_cast<int>(lanes)) - 1 : lowest;
  }
  return lowest;
}

// Returns the place of `expert` on each rank, -1: none, or the rank is lost. `experts`: [num_ranks,
// replicas] of each replica.
template <int kPerLane>
__device__ inline OfRanks<kPerLane> places_of(
    const PhysicalExperts& shape, const int32_t* experts, uint32_t lost, int expert
) {
  OfRanks<kPerLane> place;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int rank = place.rank(k);
    const bool is_left = rank < shape.num_ranks && !is_lost_rank(lost, rank);
    place.of[k] = is_left && rank == shape.owner_of(expert) ? shape.master_of(expert) : -1;
    for (int i = 0; is_left && i < shape.replicas; ++i) {
      const bool is_it = experts[rank * shape.replicas + i] == expert;
      place.of[k] = is_it ? shape.place_of(rank, i) : place.of[k];
    }
  }
  return place;
}

}  // namespace weft
