// SPDX-License-Identifier: Apache-2.0
// Quotas: plan/balance/quotas.cpp with a warp for each expert and a lane for each source and for
// each place, since a rank has at most one place of an expert. Before: place.cuh; after:
// assign.cuh.
//
// Rows that sources still have are laid end to end, and so is the room of places; a source and a
// place get what both intervals have in common. That is what filling one place after the other
// gives. Where replicas take blocks, all is laid out at once, with the master's room at the end.
#pragma once

#include <cstdint>

#include "cuda/plan/balance/launch.hpp"
#include "cuda/plan/balance/ranks.cuh"
#include "cuda/plan/shared_map.hpp"

namespace weft {

inline constexpr int kShareWarps = 4;
inline constexpr int kShareThreads = kShareWarps * kWarpLanes;

// Sources and places within groups of ranks, both laid end to end, in each group from 0 on.
template <int kPerLane>
struct LaidOut {
  OfRanks<kPerLane> group;
  OfRanks<kPerLane> sent;
  OfRanks<kPerLane> sent_begin;
  OfRanks<kPerLane> room;
  OfRanks<kPerLane> room_begin;
};

// Returns the rows common to [begin, begin + length) and [other_begin, other_begin + other).
__device__ __forceinline__ int32_t
in_common(int32_t begin, int32_t length, int32_t other_begin, int32_t other) {
  return max(0, min(begin + length, other_begin + other) - max(begin, other_begin));
}

// Lays out, by all lanes of a warp. Takes from `sent` and `room` what the groups exchange. The room
// of rank `last` lies behind all others; -1: by rank.
template <int kPerLane>
__device__ inline LaidOut<kPerLane> lay_out(
    int num_ranks,
    const OfRanks<kPerLane>& group,
    OfRanks<kPerLane>& sent,
    OfRanks<kPerLane>& room,
    int last = -1
) {
  LaidOut<kPerLane> laid = {group, sent, {}, room, {}};
  OfRanks<kPerLane> all_sent;  // of the rank's group
  OfRanks<kPerLane> all_room;
#pragma unroll
  for (int half = 0; half < kPerLane; ++half) {
    const int lanes = min(kWarpLanes, num_ranks - half * kWarpLanes);
    for (int lane = 0; lane < lanes; ++lane) {
      const int32_t its_group = __shfl_sync(kAllLanes, group.of[half], lane);
      const int32_t its_sent = __shfl_sync(kAllLanes, sent.of[half], lane);
      const int32_t its_room = __shfl_sync(kAllLanes, room.of[half], lane);
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        const bool is_same = its_group == group.of[k];
        const int its_rank = half * kWarpLanes + lane;
        const bool is_before = is_same && its_rank < group.rank(k);
        const bool has_room_before =
            its_rank != last && (group.rank(k) == last ? is_same : is_before);
        all_sent.of[k] += is_same ? its_sent : 0;
        all_room.of[k] += is_same ? its_room : 0;
        laid.sent_begin.of[k] += is_before ? its_sent : 0;
        laid.room_begin.of[k] += has_room_before ? its_room : 0;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    sent.of[k] -= in_common(laid.sent_begin.of[k], sent.of[k], 0, all_room.of[k]);
    room.of[k] -= in_common(laid.room_begin.of[k], room.of[k], 0, all_sent.of[k]);
  }
  return laid;
}

// Writes, by all lanes of a warp, the list of an expert's places, in the order of filling.
template <int kPerLane>
__device__ inline void link_places(
    const BalanceLaunch& call, int expert, const OfRanks<kPerLane>& place
) {
  const int32_t last = call.block_rows > 1 ? call.shape.master_of(expert) : -1;
  int32_t behind = last;  // the lowest place of higher ranks than those looked at
  if (last >= 0 && lane_index() == 0) {
    call.places.next[last] = -1;
  }
#pragma unroll
  for (int half = kPerLane - 1; half >= 0; --half) {
    const bool is_listed = place.of[half] >= 0 && place.of[half] != last;
    const uint32_t lanes = __ballot_sync(kAllLanes, is_listed);
    const uint32_t higher = lanes & ~low_lanes(static_cast<uint32_t>(lane_index()) + 1);
    const int next_lane = higher != 0 ? __ffs(static_cast<int>(higher)) - 1 : 0;
    const int32_t next = __shfl_sync(kAllLanes, place.of[half], next_lane);
    if (is_listed) {
      call.places.next[place.of[half]] = higher != 0 ? next : behind;
    }
    const int lowest_lane = lanes != 0 ? __ffs(static_cast<int>(lanes)) - 1 : 0;
    const int32_t lowest = __shfl_sync(kAllLanes, place.of[half], lowest_lane);
    behind = lanes != 0 ? lowest : behind;
  }
  if (lane_index() == 0) {
    call.places.first[expert] = behind;
  }
}

// Adds to `quota` the rows that a lane's sources send to the place on rank `lane` of the `half`.
template <int kPerLane>
__device__ __forceinline__ void add_common(
    const LaidOut<kPerLane>& laid, int half, int lane, OfRanks<kPerLane>& quota
) {
  const int32_t group = __shfl_sync(kAllLanes, laid.group.of[half], lane);
  const int32_t begin = __shfl_sync(kAllLanes, laid.room_begin.of[half], lane);
  const int32_t room = __shfl_sync(kAllLanes, laid.room.of[half], lane);
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int32_t common = in_common(laid.sent_begin.of[k], laid.sent.of[k], begin, room);
    quota.of[k] += group == laid.group.of[k] ? common : 0;
  }
}

// Finds an expert's quotas and places, by all lanes of a warp.
template <int kPerLane>
__device__ inline void share_expert(const BalanceLaunch& call, int expert) {
  const PhysicalExperts& shape = call.shape;
  const OfRanks<kPerLane> place = places_of<kPerLane>(call.shape, call.replicas, 0, expert);
  link_places(call, expert, place);
  OfRanks<kPerLane> own;  // what a rank's place gets of the rank itself
  OfRanks<kPerLane> sent;
  OfRanks<kPerLane> room;
  OfRanks<kPerLane> group;
  const bool is_by_blocks = call.block_rows > 1;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int rank = own.rank(k);
    if (rank < shape.num_ranks) {
      sent.of[k] = call.counts[static_cast<size_t>(rank) * shape.num_experts + expert];
      room.of[k] = place.of[k] >= 0 ? call.rows[place.of[k]] : 0;
      group.of[k] = call.domain_of != nullptr ? call.domain_of[rank] : 0;
    }
    own.of[k] = is_by_blocks ? 0 : min(sent.of[k], room.of[k]);
    sent.of[k] -= own.of[k];
    room.of[k] -= own.of[k];
  }
  LaidOut<kPerLane> near;
  LaidOut<kPerLane> far;
  if (!is_by_blocks) {
    near = lay_out(shape.num_ranks, group, sent, room);
  }
  if (is_by_blocks || call.domain_of != nullptr) {
    const int last = is_by_blocks ? shape.owner_of(expert) : -1;
    far = lay_out(shape.num_ranks, OfRanks<kPerLane>{}, sent, room, last);
  }
#pragma unroll
  for (int half = 0; half < kPerLane; ++half) {
    uint32_t lanes = __ballot_sync(kAllLanes, place.of[half] >= 0);
    for (; lanes != 0; lanes &= lanes - 1) {
      const int lane = __ffs(static_cast<int>(lanes)) - 1;
      const int32_t at = __shfl_sync(kAllLanes, place.of[half], lane);
      OfRanks<kPerLane> quota;
      add_common(near, half, lane, quota);
      add_common(far, half, lane, quota);
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        quota.of[k] += own.rank(k) == half * kWarpLanes + lane ? own.of[k] : 0;
        if (own.rank(k) < shape.num_ranks) {
          call.quotas[static_cast<size_t>(own.rank(k)) * shape.count() + at] = quota.of[k];
        }
      }
    }
  }
}

// Clears, by all lanes of a warp, the quotas of the `index`-th place for replicas if it is empty.
__device__ inline void clear_empty(const BalanceLaunch& call, int index) {
  const PhysicalExperts& shape = call.shape;
  if (call.replicas[index] >= 0) {
    return;
  }
  const int place = shape.place_of(index / shape.replicas, index % shape.replicas);
  for (int source = lane_index(); source < shape.num_ranks; source += kWarpLanes) {
    call.quotas[static_cast<size_t>(source) * shape.count() + place] = 0;
  }
  if (lane_index() == 0) {
    call.places.next[place] = -1;
  }
}

// Returns blocks for a warp for each expert, then one for each place for replicas.
inline int share_blocks(const PhysicalExperts& shape) {
  return (shape.count() + kShareWarps - 1) / kShareWarps;
}

}  // namespace weft
