// SPDX-License-Identifier: Apache-2.0
// Counts one rank's routes by expert, and gives each in token order one of its expert's places.
//
// Blocks and their warps have consecutive parts of the routes. A route's number among those to its
// expert adds up the counts of earlier blocks, of earlier warps of the block, and of what its own
// warp has passed. Before: the router; after: the ordinary plan, of physical experts.
#pragma once

#include <cstdint>

#include "cuda/device/lanes.cuh"
#include "cuda/plan/balance/launch.hpp"
#include "cuda/plan/balance/ranks.cuh"
#include "cuda/plan/shared_map.hpp"

namespace weft {

inline constexpr int kAssignWarps = 8;  // a guess
inline constexpr int kAssignThreads = kAssignWarps * kWarpLanes;

struct AssignShared {
  int32_t* first;   // [num_experts] PlaceLists
  int32_t* next;    // [shape.count()]
  int32_t* end;     // [shape.count()] number behind the last route of its expert that a place takes
  int32_t* counts;  // [kAssignWarps, num_experts]
  uint32_t lost;    // as BalanceLaunch has it
};

WEFT_HD inline int count_shared_bytes(const PhysicalExperts& shape) {
  return static_cast<int>(sizeof(int32_t)) * shape.num_experts;
}
WEFT_HD inline int assign_shared_bytes(const PhysicalExperts& shape) {
  return static_cast<int>(sizeof(int32_t)) *
         ((1 + kAssignWarps) * shape.num_experts + 2 * shape.count());
}

__device__ inline PartSpan routes_of_block(const AssignLaunch& call) {
  const auto num_routes = static_cast<int32_t>(call.num_tokens * call.topk);
  return part_span(0, num_routes, kAssignBlocks, blockIdx.x);
}

// Zeroes `size` counts.
__device__ inline void clear_counts(int32_t* counts, int size) {
  for (int i = static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x)) {
    counts[i] = 0;
  }
}

// Returns a route's expert; -1: none. What is neither that nor an expert becomes num_experts.
__device__ __forceinline__ int32_t expert_of(const AssignLaunch& call, int32_t route) {
  const int32_t token = route / call.topk;
  const int64_t at = int64_t{token} * call.stride + (route - token * call.topk);
  const int64_t given = given_expert(call.topk_idx, call.index_bytes, static_cast<size_t>(at));
  const bool is_good = given >= -1 && given < call.shape.num_experts;
  return is_good ? static_cast<int32_t>(given) : call.shape.num_experts;
}

__device__ __forceinline__ bool is_expert(const PhysicalExperts& shape, int32_t expert) {
  return expert >= 0 && expert < shape.num_experts;
}

// Adds to `counts` [num_experts] the routes of a span at thread, thread + step, ...
__device__ inline void count_span(
    const AssignLaunch& call, const PartSpan& routes, int thread, int step, int32_t* counts
) {
  for (int32_t route = routes.first + thread; route < routes.last; route += step) {
    const int32_t expert = expert_of(call, route);
    if (is_expert(call.shape, expert)) {
      atomicAdd(counts + expert, 1);
    }
  }
}

// Loads places and quotas, by all threads.
__device__ inline AssignShared load_places(const AssignLaunch& call, int32_t* base) {
  const int num_experts = call.shape.num_experts;
  const int num_places = call.shape.count();
  AssignShared shared;
  shared.first = base;
  shared.next = shared.first + num_experts;
  shared.end = shared.next + num_places;
  shared.counts = shared.end + num_places;
  shared.lost = load_lost(call.lost);
  const int32_t* const quotas = call.quotas + static_cast<size_t>(call.source) * num_places;
  const auto thread = static_cast<int>(threadIdx.x);
  for (int expert = thread; expert < num_experts; expert += kAssignThreads) {
    shared.first[expert] = call.places.first[expert];
  }
  for (int place = thread; place < num_places; place += kAssignThreads) {
    shared.next[place] = call.places.next[place];
    shared.end[place] = quotas[place];
  }
  clear_counts(shared.counts, kAssignWarps * num_experts);
  __syncthreads();
  return shared;
}

// Turns, by one thread, the quotas of an expert's places into ends.
__device__ __forceinline__ void quotas_to_ends(const AssignShared& shared, int expert) {
  int32_t end = 0;
  for (int place = shared.first[expert]; place >= 0; place = shared.next[place]) {
    end += shared.end[place];
    shared.end[place] = end;
  }
}

// Turns, by all threads, quotas into ends and warps' counts into the numbers of their first routes.
__device__ inline void sum_up(const AssignLaunch& call, const AssignShared& shared) {
  const int num_experts = call.shape.num_experts;
  for (int expert = static_cast<int>(threadIdx.x); expert < num_experts; expert += kAssignThreads) {
    quotas_to_ends(shared, expert);
    int32_t number = 0;
#pragma unroll 8
    for (unsigned block = 0; block < blockIdx.x; ++block) {
      number += __ldg(call.block_counts + static_cast<size_t>(block) * num_experts + expert);
    }
    for (int warp = 0; warp < kAssignWarps; ++warp) {
      int32_t& of_warp = shared.counts[warp * num_experts + expert];
      const int32_t count = of_warp;
      of_warp = number;
      number += count;
    }
  }
  __syncthreads();
}

// Gives 32 routes their places, by all lanes of a warp with its own `counts`; lanes beyond the part
// have expert -1.
__device__ __forceinline__ int32_t assign_step(
    const PhysicalExperts& shape, const AssignShared& shared, int32_t* counts, int32_t expert
) {
  const auto lane = static_cast<uint32_t>(lane_index());
  const bool is_route = is_expert(shape, expert);
  const uint32_t alone = 1U << 31 | lane;
  const uint32_t same =
      __match_any_sync(kAllLanes, is_route ? static_cast<uint32_t>(expert) : alone);
  const uint32_t lower = same & low_lanes(lane);
  const int32_t begin = is_route ? counts[expert] : 0;
  __syncwarp();
  if (is_route && lower == 0) {
    counts[expert] = begin + __popc(same);
  }
  __syncwarp();
  if (!is_route) {
    return expert < 0 ? -1 : shape.count();
  }
  const int32_t number = begin + __popc(lower);
  int32_t place = shared.first[expert];
  while (place >= 0 && number >= shared.end[place]) {
    place = shared.next[place];
  }
  if (place < 0) {
    return is_lost_rank(shared.lost, shape.owner_of(expert)) ? -1 : shape.count();
  }
  return place;
}

}  // namespace weft
