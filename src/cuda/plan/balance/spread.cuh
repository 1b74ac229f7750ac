// SPDX-License-Identifier: Apache-2.0
// Finds rows for replicas whose placement is given: plan/balance/spread.cpp by one warp, with a
// lane for each rank, since a rank has at most one place of an expert. pour.cuh has the core.
// After: share_out.cuh.
#pragma once

#include <cstdint>

#include "cuda/device/lanes.cuh"
#include "cuda/plan/balance/launch.hpp"
#include "cuda/plan/balance/place.cuh"
#include "cuda/plan/balance/pour.cuh"
#include "cuda/plan/balance/ranks.cuh"
#include "cuda/plan/shared_map.hpp"
#include "weft/plan.hpp"

namespace weft {

struct SpreadLaunch {
  BalanceLaunch balance;
  int32_t placement[kMaxDomainRanks * kMostReplicas] = {};  // as BalanceLaunch::replicas
};

static_assert(kMaxDomainRanks <= kWarpLanes && sizeof(SpreadLaunch) <= 4096);

struct SpreadShared {
  int32_t* rows;     // [num_experts] of all sources
  int32_t* spread;   // [num_experts] experts that have replicas on ranks that are left, ascending
  int32_t* experts;  // [num_ranks, replicas] of each replica, -1: none
  int32_t* here;     // [shape.count()] rows of each place
};

WEFT_HD inline int spread_shared_bytes(const PhysicalExperts& shape) {
  return static_cast<int>(sizeof(int32_t)) *
         (2 * shape.num_experts + shape.num_ranks * shape.replicas + shape.count());
}

__device__ inline SpreadShared spread_shared(const PhysicalExperts& shape, int32_t* base) {
  SpreadShared shared;
  shared.rows = base;
  shared.spread = shared.rows + shape.num_experts;
  shared.experts = shared.spread + shape.num_experts;
  shared.here = shared.experts + shape.num_ranks * shape.replicas;
  return shared;
}

// Puts, by all threads, every row at its master, unless that is lost, and replicas as given:
// placement[i] is of the i-th place for replicas.
template <class Given>
__device__ inline void place_given(
    const BalanceLaunch& call, uint32_t lost, const SpreadShared& shared, const Given* placement
) {
  const PhysicalExperts& shape = call.shape;
  const auto thread = static_cast<int>(threadIdx.x);
  for (int expert = thread; expert < shape.num_experts; expert += kPlaceThreads) {
    const bool is_lost = lost != 0 && is_lost_rank(lost, shape.owner_of(expert));
    shared.here[shape.master_of(expert)] = is_lost ? 0 : shared.rows[expert];
    shared.spread[expert] = 0;
  }
  __syncthreads();
  for (int i = thread; i < shape.num_ranks * shape.replicas; i += kPlaceThreads) {
    const int32_t expert = placement[i];
    shared.experts[i] = expert;
    call.replicas[i] = expert;
    shared.here[shape.place_of(i / shape.replicas, i % shape.replicas)] = 0;
    if (expert >= 0 && !is_lost_rank(lost, i / shape.replicas)) {
      shared.spread[expert] = 1;  // has replicas
    }
  }
  __syncthreads();
}

// Gives, by all lanes of a warp, the rows of an expert with a lost master to its last replica.
__device__ inline void stand_in(
    const PhysicalExperts& shape,
    uint32_t lost,
    const SpreadShared& shared,
    int expert,
    OfRanks<1>& load
) {
  const OfRanks<1> place = places_of<1>(shape, shared.experts, lost, expert);
  if (lane_index() == last_rank(shape, lost, expert, place)) {
    shared.here[place.of[0]] = shared.rows[expert];
    load.of[0] += shared.rows[expert];
  }
}

// Pours, by all lanes of a warp. `load`: rows of each rank, with all rows at their masters.
__device__ inline void pour_given(
    const BalanceLaunch& call, uint32_t lost, const SpreadShared& shared, OfRanks<1> load
) {
  const int count = list_experts(call.shape, shared.spread);
  for (int i = 0; lost != 0 && i < count; ++i) {
    if (is_lost_rank(lost, call.shape.owner_of(shared.spread[i]))) {
      stand_in(call.shape, lost, shared, shared.spread[i], load);
    }
  }
  pour_all(call, lost, {shared.spread, shared.experts, shared.here}, count, load);
}

// Spreads rows, by all threads of a block, once `rows` of all experts are there. `loads`: memory
// for [num_ranks].
template <class Given>
__device__ __forceinline__ void spread_rows(
    const BalanceLaunch& call,
    uint32_t lost,
    const SpreadShared& shared,
    int32_t* loads,
    const Given* placement
) {
  sum_ranks(call.shape, shared.rows, loads);
  place_given(call, lost, shared, placement);
  if (warp_in_block() == 0) {
    const int rank = lane_index();
    pour_given(call, lost, shared, {rank < call.shape.num_ranks ? loads[rank] : 0});
  }
  __syncthreads();
}

}  // namespace weft
