// SPDX-License-Identifier: Apache-2.0
// Evens out ranks by moving rows between the places of each expert, with one warp: pour_rows() of
// plan/balance/spread.cpp. place.cuh and spread.cuh use it.
#pragma once

#include <cstdint>

#include "cuda/device/lanes.cuh"
#include "cuda/plan/balance/launch.hpp"
#include "cuda/plan/balance/ranks.cuh"
#include "plan/balance/balance.hpp"

namespace weft {

struct PouredRows {
  int32_t* poured;         // [num_experts] a mark for experts that have replicas on ranks left
  const int32_t* experts;  // [num_ranks, replicas] of each replica, -1: none
  int32_t* here;           // [shape.count()] rows of each place
};

// Turns, by all lanes of a warp, the marks of experts that have replicas into a list. Returns its
// length.
__device__ inline int list_experts(const PhysicalExperts& shape, int32_t* poured) {
  int count = 0;
  for (int first = 0; first < shape.num_experts; first += kWarpLanes) {
    const int expert = first + lane_index();
    const bool is_listed = expert < shape.num_experts && poured[expert] != 0;
    const uint32_t lanes = __ballot_sync(kAllLanes, is_listed);
    __syncwarp();  // all have read their marks: a ballot alone orders no memory
    if (is_listed) {
      const auto lane = static_cast<uint32_t>(lane_index());
      poured[count + __popc(lanes & low_lanes(lane))] = expert;
    }
    count += __popc(lanes);
  }
  __syncwarp();
  return count;
}

// Pours, by all lanes of a warp, all rows of an expert on its places: to the emptiest ranks, up to
// one level, the first of them with one more. `load`: rows of each rank. Returns whether anything
// changed.
template <int kPerLane>
__device__ inline bool pour(
    const PhysicalExperts& shape,
    uint32_t lost,
    const PouredRows& rows,
    int expert,
    OfRanks<kPerLane>& load
) {
  const OfRanks<kPerLane> place = places_of<kPerLane>(shape, rows.experts, lost, expert);
  OfRanks<kPerLane> before;
  int32_t all = 0;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    before.of[k] = place.of[k] >= 0 ? rows.here[place.of[k]] : 0;
    load.of[k] -= before.of[k];
    all += before.of[k];
  }
  all = __reduce_add_sync(kAllLanes, all);
  OfRanks<kPerLane> number;      // of places that are filled before this one
  OfRanks<kPerLane> of_earlier;  // what their ranks have
#pragma unroll
  for (int half = 0; half < kPerLane; ++half) {
    uint32_t left = __ballot_sync(kAllLanes, place.of[half] >= 0);
    for (; left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const int32_t its_load = __shfl_sync(kAllLanes, load.of[half], lane);
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        const bool is_lower = half * kWarpLanes + lane < load.rank(k);
        const bool is_earlier = its_load < load.of[k] || (its_load == load.of[k] && is_lower);
        number.of[k] += is_earlier ? 1 : 0;
        of_earlier.of[k] += is_earlier ? its_load : 0;
      }
    }
  }
  bool is_used[kPerLane];
  int32_t num_used = 0;
  int32_t sum = 0;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int64_t filled = int64_t{load.of[k]} * number.of[k];
    is_used[k] =
        place.of[k] >= 0 && (number.of[k] == 0 || filled < int64_t{all} + of_earlier.of[k]);
    num_used += __popc(__ballot_sync(kAllLanes, is_used[k]));
    sum += is_used[k] ? load.of[k] : 0;
  }
  sum = all + __reduce_add_sync(kAllLanes, sum);
  const int32_t level = num_used > 0 ? sum / num_used : 0;
  const int32_t more = sum - level * num_used;
  bool has_changed = false;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int32_t now = is_used[k] ? level + (number.of[k] < more ? 1 : 0) - load.of[k] : 0;
    if (place.of[k] >= 0) {
      rows.here[place.of[k]] = now;
    }
    load.of[k] += now;
    has_changed = has_changed || now != before.of[k];
  }
  return __any_sync(kAllLanes, has_changed) != 0;
}

// Returns the rank whose place of a listed expert takes what is less than a block: the owner or, if
// it is lost, the rank of the last replica. `place` as places_of() has it.
template <int kPerLane>
__device__ __forceinline__ int last_rank(
    const PhysicalExperts& shape, uint32_t lost, int expert, const OfRanks<kPerLane>& place
) {
  int last = -1;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const uint32_t lanes = __ballot_sync(kAllLanes, place.of[k] >= 0);
    const int highest = kWarpLanes - 1 - __clz(static_cast<int>(lanes));
    last = lanes != 0 ? k * kWarpLanes + highest : last;
  }
  const int owner = shape.owner_of(expert);
  return is_lost_rank(lost, owner) ? last : owner;
}

// Leaves an expert's places whole blocks, and the last one the rest, by all lanes of a warp.
template <int kPerLane>
__device__ inline void leave_whole_blocks(
    const BalanceLaunch& call,
    uint32_t lost,
    const PouredRows& rows,
    int expert,
    OfRanks<kPerLane>& load
) {
  const auto place = places_of<kPerLane>(call.shape, rows.experts, lost, expert);
  const int last = last_rank(call.shape, lost, expert, place);
  OfRanks<kPerLane> rest;
  int32_t sum = 0;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const bool gives = place.of[k] >= 0 && place.rank(k) != last;
    rest.of[k] = gives ? rows.here[place.of[k]] % call.block_rows : 0;
    sum += rest.of[k];
  }
  sum = __reduce_add_sync(kAllLanes, sum);
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int32_t more = place.rank(k) == last ? sum : -rest.of[k];
    if (place.of[k] >= 0) {
      rows.here[place.of[k]] += more;
    }
    load.of[k] += more;
  }
}

// Pours, by all lanes of a warp, the list's first `count` experts until nothing changes.
template <int kPerLane>
__device__ inline void pour_all(
    const BalanceLaunch& call,
    uint32_t lost,
    const PouredRows& rows,
    int count,
    OfRanks<kPerLane>& load
) {
  bool has_changed = true;
  for (int turn = 0; turn < kMostTurns && has_changed; ++turn) {
    has_changed = false;
    for (int i = 0; i < count; ++i) {
      has_changed = pour(call.shape, lost, rows, rows.poured[i], load) || has_changed;
    }
  }
  for (int i = 0; call.block_rows > 1 && i < count; ++i) {
    leave_whole_blocks(call, lost, rows, rows.poured[i], load);
  }
}

}  // namespace weft
