// SPDX-License-Identifier: Apache-2.0
// Rows for replicas that lie where somebody else decided: plan/balance/spread.cpp by one warp, with
// a lane for each rank, since a rank has at most one place of an expert. After: share_out.cuh.
#pragma once

#include <cstdint>

#include "cuda/device/lanes.cuh"
#include "cuda/plan/balance/launch.hpp"
#include "cuda/plan/balance/lost.cuh"
#include "cuda/plan/balance/place.cuh"
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

// All threads: every row at its master, unless that is lost, and the placement as it is given:
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

// All lanes of a warp turn the marks of experts that have replicas into the list of these. -> how
// many there are.
__device__ inline int list_experts(const PhysicalExperts& shape, int32_t* spread) {
  int count = 0;
  for (int first = 0; first < shape.num_experts; first += kWarpLanes) {
    const int expert = first + lane_index();
    const bool is_listed = expert < shape.num_experts && spread[expert] != 0;
    const uint32_t lanes = __ballot_sync(kAllLanes, is_listed);  // all have read their marks
    if (is_listed) {
      const auto lane = static_cast<uint32_t>(lane_index());
      spread[count + __popc(lanes & low_lanes(lane))] = expert;
    }
    count += __popc(lanes);
    __syncwarp();
  }
  return count;
}

// The place of an expert on the lane's rank, -1: none, or the rank is lost.
__device__ __forceinline__ int place_on_lane(
    const PhysicalExperts& shape, uint32_t lost, const SpreadShared& shared, int expert
) {
  const int rank = lane_index();
  if (is_lost_rank(lost, rank)) {
    return -1;
  }
  int place = rank == shape.owner_of(expert) ? shape.master_of(expert) : -1;
  for (int i = 0; rank < shape.num_ranks && i < shape.replicas; ++i) {
    const bool is_it = shared.experts[rank * shape.replicas + i] == expert;
    place = is_it ? shape.place_of(rank, i) : place;
  }
  return place;
}

// All lanes of a warp pour all rows of an expert on its places: to the emptiest ranks, up to one
// level, of which the first have one more. `load`: rows of the lane's rank. True if it changed
// anything.
__device__ inline bool pour(
    const PhysicalExperts& shape,
    uint32_t lost,
    const SpreadShared& shared,
    int expert,
    int32_t& load
) {
  const int lane = lane_index();
  const int place = place_on_lane(shape, lost, shared, expert);
  const bool is_place = place >= 0;
  const int32_t before = is_place ? shared.here[place] : 0;
  const int32_t rows = __reduce_add_sync(kAllLanes, before);
  load -= before;
  int32_t number = 0;      // of places that are filled before this one
  int32_t of_earlier = 0;  // what their ranks have
  for (uint32_t left = __ballot_sync(kAllLanes, is_place); left != 0; left &= left - 1) {
    const int other = __ffs(static_cast<int>(left)) - 1;
    const int32_t its_load = __shfl_sync(kAllLanes, load, other);
    const bool is_earlier = its_load < load || (its_load == load && other < lane);
    number += is_earlier ? 1 : 0;
    of_earlier += is_earlier ? its_load : 0;
  }
  const bool is_used =
      is_place && (number == 0 || int64_t{load} * number < int64_t{rows} + of_earlier);
  const int32_t num_used = __popc(__ballot_sync(kAllLanes, is_used));
  const int32_t sum = rows + __reduce_add_sync(kAllLanes, is_used ? load : 0);
  const int32_t level = sum / num_used;
  const int32_t now = is_used ? level + (number < sum - level * num_used ? 1 : 0) - load : 0;
  if (is_place) {
    shared.here[place] = now;
  }
  load += now;
  return __any_sync(kAllLanes, now != before) != 0;
}

// Of an expert that is listed, the rank whose place takes what is less than a block: its owner, or
// where that is lost the one of its last replica. `place` as place_on_lane() has it.
__device__ __forceinline__ int last_rank(
    const PhysicalExperts& shape, uint32_t lost, int expert, int place
) {
  const uint32_t lanes = __ballot_sync(kAllLanes, place >= 0);
  const int owner = shape.owner_of(expert);
  return is_lost_rank(lost, owner) ? kWarpLanes - 1 - __clz(static_cast<int>(lanes)) : owner;
}

// All lanes of a warp: places of an expert keep whole blocks, and the last one takes the rest.
__device__ inline void leave_whole_blocks(
    const BalanceLaunch& call, uint32_t lost, const SpreadShared& shared, int expert
) {
  const int place = place_on_lane(call.shape, lost, shared, expert);
  const bool is_last = lane_index() == last_rank(call.shape, lost, expert, place);
  const int32_t rest = place >= 0 && !is_last ? shared.here[place] % call.block_rows : 0;
  const int32_t sum = __reduce_add_sync(kAllLanes, rest);
  if (place >= 0) {
    shared.here[place] += is_last ? sum : -rest;
  }
}

// All lanes of a warp: the last replica of an expert stands in for its master, which is lost.
__device__ inline void stand_in(
    const PhysicalExperts& shape,
    uint32_t lost,
    const SpreadShared& shared,
    int expert,
    int32_t& load
) {
  const int place = place_on_lane(shape, lost, shared, expert);
  if (lane_index() == last_rank(shape, lost, expert, place)) {
    shared.here[place] = shared.rows[expert];
    load += shared.rows[expert];
  }
}

// All lanes of a warp. `load` as for pour(), with all rows at their masters.
__device__ inline void pour_all(
    const BalanceLaunch& call, uint32_t lost, const SpreadShared& shared, int32_t load
) {
  const int count = list_experts(call.shape, shared.spread);
  for (int i = 0; lost != 0 && i < count; ++i) {
    if (is_lost_rank(lost, call.shape.owner_of(shared.spread[i]))) {
      stand_in(call.shape, lost, shared, shared.spread[i], load);
    }
  }
  bool has_changed = true;
  for (int turn = 0; turn < kMostTurns && has_changed; ++turn) {
    has_changed = false;
    for (int i = 0; i < count; ++i) {
      has_changed = pour(call.shape, lost, shared, shared.spread[i], load) || has_changed;
    }
  }
  for (int i = 0; call.block_rows > 1 && i < count; ++i) {
    leave_whole_blocks(call, lost, shared, shared.spread[i]);
  }
}

// All threads of a block, once `rows` of all experts are there. `loads`: memory for [num_ranks].
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
    pour_all(call, lost, shared, rank < call.shape.num_ranks ? loads[rank] : 0);
  }
  __syncthreads();
}

}  // namespace weft
