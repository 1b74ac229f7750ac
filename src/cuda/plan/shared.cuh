// SPDX-License-Identifier: Apache-2.0
// State that the threads of a block of the plan kernel share (PlanShared, in shared memory), and
// the place of each thread in the call (PlanPlace).
//
// Counts come in columns: [0, num_ranks) are arrivals by receiving rank, [num_ranks, num_ranks +
// num_experts) are routes by expert. In this order they also travel behind a handshake.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/device/lanes.cuh"
#include "cuda/device/wait.cuh"
#include "cuda/layout/launch.hpp"
#include "cuda/plan/shared_map.hpp"

namespace weft {

inline constexpr uint16_t kNoShortExpert = UINT16_MAX;

// Arrays that the threads of a block share.
struct PlanShared : PlanArrays {
  std::byte** control;  // [num_ranks] control regions as mapped here
  std::byte** blocks;   // [num_ranks] plan blocks as mapped here; null: gets no records
  int32_t* received;    // [num_ranks] arrivals from each rank
  int64_t* partial;     // [num_warps] of a reduction or scan
  uint64_t* call;       // the call's number in full, as one thread writes it
  uint32_t num_routes;  // most of a rank, in a plan that is made from all ranks' routing

  // Returns the experts of the routes of `rank`: [num_routes], all ones for none. own(): [columns]
  // counts of this rank.
  [[nodiscard]] __device__ uint16_t* experts_of(uint32_t rank) const {
    return experts + rank * num_routes;
  }
  [[nodiscard]] __device__ int32_t* own() const { return reinterpret_cast<int32_t*>(message + 1); }
};

// Shared arrays of constant sizes; the rest is dynamic.
struct SmallPlanShared {
  std::byte* control[kMaxDomainRanks];
  std::byte* blocks[kMaxDomainRanks];
  int32_t received[kMaxDomainRanks];
  int64_t partial[kMaxPlanThreads / kPlanLanes];
  uint64_t call;
};

// Lays arrays out; `base` has PlanSharedMap::num_bytes().
__device__ inline PlanShared carve(
    const PlanSharedMap& map, std::byte* base, SmallPlanShared& small
) {
  PlanShared shared;
  map.lay_out(shared, [&](auto*& array, uint32_t bytes) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(base);
    base += bytes;
  });
  shared.control = small.control;
  shared.blocks = small.blocks;
  shared.received = small.received;
  shared.partial = small.partial;
  shared.call = &small.call;
  shared.num_routes = map.num_routes;
  return shared;
}

// Place of this thread in the call. A warp takes the tokens [tokens.first, tokens.last), `step` at
// a time: lane = group * topk + k, so that all routes of a token are in one warp instruction.
struct PlanPlace {
  uint32_t epoch = 0;
  uint32_t source = 0;     // the rank whose tokens are planned: this one, except in fused.cuh
  int32_t num_tokens = 0;  // of that rank
  uint32_t num_ranks = 1;
  uint32_t columns = 0;
  uint32_t warp = 0;
  uint32_t num_warps = 1;
  uint32_t num_blocks = 1;  // the first of the grid
  uint32_t lane = 0;
  PartSpan tokens;
  uint32_t step = 1;
  uint32_t group = 0;
  uint32_t k = 0;
  bool is_used = false;  // the lane stands for a route
  FastDivide experts_per_rank;
  uint32_t lost = 0;          // as LocalState has it
  uint32_t nowhere = 0;       // those of them that routes cannot go to, or no others
  bool writes_tokens = true;  // this block writes what this rank keeps of its own tokens
  // Arrays from which routes are read: row `token` has its k-th at token * stride + k.
  const int32_t* route_expert = nullptr;
  const uint16_t* short_expert = nullptr;  // instead, all ones for none
  const float* route_weight = nullptr;
  uint32_t stride = 0;
  EagerSlot* eager_slots = nullptr;  // [num_tokens, topk] of that rank; fused.cuh only

  [[nodiscard]] __device__ bool is_own(const RankView& me) const {
    return source == static_cast<uint32_t>(me.rank);
  }
  [[nodiscard]] __device__ bool is_lost(uint32_t rank) const { return (lost >> rank & 1U) != 0; }
  // Returns whether routes to the expert count as none, as no rank has it.
  [[nodiscard]] __device__ bool is_nowhere(uint32_t expert) const {
    return is_nowhere(expert, experts_per_rank);
  }
  [[nodiscard]] __device__ bool is_nowhere(uint32_t expert, const FastDivide& per_rank) const {
    return nowhere != 0 && (nowhere >> per_rank.divide(expert) & 1U) != 0;
  }
};

// Returns this thread's place, without tokens.
__device__ inline PlanPlace plan_place(const PlanLaunch& call, uint32_t epoch) {
  PlanPlace place;
  place.epoch = epoch;
  place.source = static_cast<uint32_t>(call.me.rank);
  place.num_tokens = call.num_tokens;
  place.lost = lost_ranks(call.me);
  place.nowhere = call.keeps_lost ? 0 : place.lost;
  place.num_ranks = call.plan.map.num_ranks;
  place.columns = call.plan.map.num_ranks + call.plan.map.num_experts;
  place.warp = threadIdx.x / kPlanLanes;
  place.num_warps = blockDim.x / kPlanLanes;
  place.num_blocks = static_cast<uint32_t>(call.num_blocks);
  place.lane = threadIdx.x % kPlanLanes;
  place.step = call.by_topk.divide(kPlanLanes);
  place.group = call.by_topk.divide(place.lane);
  place.k = call.by_topk.remainder(place.lane, place.group);
  place.is_used = place.group < place.step;
  place.experts_per_rank = call.plan.map.experts_per_rank;
  place.route_expert = call.plan.route_expert();
  place.route_weight = call.plan.route_weight();
  place.stride = call.plan.map.max_topk;
  return place;
}

// Returns the warp's share of this rank's tokens, which the grid's first blocks plan together.
__device__ inline PartSpan own_tokens(const PlanLaunch& call, const PlanPlace& place) {
  const PartSpan block = part_span(0, call.num_tokens, place.num_blocks, blockIdx.x);
  return part_span(block.first, block.last, place.num_warps, place.warp);
}

}  // namespace weft
