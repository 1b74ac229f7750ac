// SPDX-License-Identifier: Apache-2.0
// First part of the plan kernel: a warp reads the routing of its tokens, writes it into the plan
// and counts its routes by expert and its arrivals by receiving rank. After: swap_counts.cuh.
// plan/fused.cuh uses the same functions.
#pragma once

#include "cuda/device/lanes.cuh"
#include "cuda/device/wait.cuh"
#include "cuda/plan/shared.cuh"

namespace weft {

// Arrivals that the tokens of a step make, as each lane knows them. A step is what a warp looks at
// in one instruction, 32 / topk tokens.
struct StepArrivals {
  uint32_t lanes = 0;  // lane r < num_ranks: which lanes are the first of their token to rank r
  uint32_t lower_ranks = 0;  // receivers of the lane's token before the lane's own
};

// Finds a step's arrivals. `target`: the rank that the lane's route goes to, num_ranks or more for
// none.
__device__ __forceinline__ StepArrivals
step_arrivals(const PlanPlace& place, uint32_t pair, uint32_t target, uint32_t topk) {
  const bool is_first = (pair & low_lanes(place.lane)) == 0;
  const uint32_t token_lanes = low_lanes(topk) << place.group * topk;
  StepArrivals out;
#pragma unroll 1
  for (uint32_t rank = 0; rank < place.num_ranks; ++rank) {
    const uint32_t lanes = __ballot_sync(kAllLanes, is_first && target == rank);
    out.lanes = place.lane == rank ? lanes : out.lanes;
    out.lower_ranks += rank < target && (lanes & token_lanes) != 0 ? 1U : 0U;
  }
  return out;
}

// Returns the lanes whose routes are of the same token and go to the same rank; without a route,
// this lane alone.
__device__ __forceinline__ uint32_t
pair_lanes(const PlanPlace& place, bool is_route, uint32_t target) {
  const uint32_t alone = 1U << 16 | place.lane;
  return __match_any_sync(kAllLanes, is_route ? place.group << 8 | target : alone);
}

// Raises a fault of this rank's own routing, of `token`; FaultKind says what the numbers mean.
__device__ inline void raise_bad_token(
    const RankView& me, uint32_t epoch, FaultKind kind, int32_t token, int32_t what, int64_t wanted
) {
  const FaultRecord fault = {
      .kind = kind,
      .op = Op::kPlan,
      .epoch = epoch,
      .peer = me.rank,
      .what = what,
      .seen = token,
      .wanted = wanted};
  raise_fault(me, fault);
}

// Returns the set ones of eight bytes of a map's row from `first` on, as a mask.
__device__ __forceinline__ uint32_t
map_bits(const uint8_t* row, uint32_t first, uint32_t num_experts, bool is_aligned) {
  uint32_t bits = 0;
  if (is_aligned) {
    if (first < num_experts) {
      const uint2 eight = __ldg(reinterpret_cast<const uint2*>(row + first));
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        bits |= (eight.x >> (8 * i) & 0xffU) != 0 ? 1U << i : 0;
        bits |= (eight.y >> (8 * i) & 0xffU) != 0 ? 16U << i : 0;
      }
    }
    return bits;
  }
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    if (first + i < num_experts) {
      bits |= __ldg(row + first + i) != 0 ? 1U << i : 0;
    }
  }
  return bits;
}

// Refuses, by one warp, non-experts among the indices that a token's row of the map was made of.
__device__ __forceinline__ void check_indices(
    const PlanLaunch& call, const PlanPlace& place, int32_t token
) {
  const auto count = static_cast<uint32_t>(call.num_indices);
  for (uint32_t k = place.lane; k < count; k += kPlanLanes) {
    const size_t at = static_cast<size_t>(token) * count + k;
    const int64_t value = given_expert(call.topk_idx, call.index_bytes, at);
    if (value < -1 || value >= static_cast<int64_t>(call.plan.map.num_experts)) {
      const auto what = static_cast<int32_t>(k);
      raise_bad_token(call.me, place.epoch, FaultKind::kBadIndex, token, what, value);
    }
  }
}

// Turns, by one warp, the set experts of its tokens' map rows, in ascending order, into routes.
__device__ inline void read_map(const PlanLaunch& call, const PlanPlace& place) {
  constexpr int kBatch = 4;  // rows in flight; a guess
  constexpr uint32_t kLaneExperts = 8;
  const uint32_t num_experts = call.plan.map.num_experts;
  const auto* map = reinterpret_cast<const uint8_t*>(call.map);
  const bool is_aligned =
      num_experts % kLaneExperts == 0 && reinterpret_cast<uintptr_t>(map) % kLaneExperts == 0;
  const auto topk = static_cast<uint32_t>(call.topk);
  int32_t* route_expert = call.plan.route_expert();
  float* route_weight = call.plan.route_weight();

  for (int32_t first = place.tokens.first; first < place.tokens.last; first += kBatch) {
    uint32_t found[kBatch] = {};
    for (uint32_t base = 0; base < num_experts; base += kLaneExperts * kPlanLanes) {
      const uint32_t lane_first = base + place.lane * kLaneExperts;
      uint32_t bits[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int32_t token = first + i;
        bits[i] = token < place.tokens.last ? map_bits(
                                                  map + static_cast<size_t>(token) * num_experts,
                                                  lane_first,
                                                  num_experts,
                                                  is_aligned
                                              )
                                            : 0;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const auto count = static_cast<uint32_t>(__popc(bits[i]));
        uint32_t up_to = count;
#pragma unroll
        for (uint32_t distance = 1; distance < kPlanLanes; distance *= 2) {
          const uint32_t other = __shfl_up_sync(kAllLanes, up_to, distance);
          up_to += place.lane >= distance ? other : 0;
        }
        uint32_t k = found[i] + up_to - count;
        found[i] += __shfl_sync(kAllLanes, up_to, kPlanLanes - 1);
        const auto token = static_cast<size_t>(first + i);
        for (uint32_t left = bits[i]; left != 0 && k < topk; left &= left - 1, ++k) {
          const uint32_t expert = lane_first + static_cast<uint32_t>(__ffs(left)) - 1;
          const size_t route = token * call.plan.map.max_topk + k;
          route_expert[route] = place.is_nowhere(expert) ? -1 : static_cast<int32_t>(expert);
          if (call.weights != nullptr) {
            route_weight[route] = __ldg(call.weights + token * num_experts + expert);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t token = first + i;
      if (token >= place.tokens.last) {
        break;
      }
      if (call.topk_idx != nullptr) {
        check_indices(call, place, token);
      }
      if (place.lane >= found[i] && place.lane < topk) {
        const size_t route = static_cast<size_t>(token) * call.plan.map.max_topk + place.lane;
        route_expert[route] = -1;
        if (call.weights != nullptr) {
          route_weight[route] = 0.0F;
        }
      }
      if (found[i] > topk && place.lane == 0) {
        raise_bad_token(
            call.me,
            place.epoch,
            FaultKind::kTooMany,
            token,
            static_cast<int32_t>(found[i]),
            call.topk
        );
      }
    }
  }
}

// Reads the experts of up to kBatch steps of the warp's tokens from topk_idx into the plan.
template <int kBatch>
__device__ __forceinline__ void read_topk(
    const PlanLaunch& call, const PlanPlace& place, int32_t first, int32_t (&expert)[kBatch]
) {
  int64_t value[kBatch];
  float weight[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int32_t token = first + static_cast<int32_t>(i * place.step + place.group);
    const size_t route = static_cast<size_t>(token) * static_cast<uint32_t>(call.topk) + place.k;
    value[i] = -1;
    weight[i] = 0.0F;
    if (place.is_used && token < place.tokens.last) {
      value[i] = given_expert(call.topk_idx, call.index_bytes, route);
      if (call.weights != nullptr) {
        weight[i] = __ldg(call.weights + route);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int32_t token = first + static_cast<int32_t>(i * place.step + place.group);
    expert[i] = static_cast<int32_t>(value[i]);
    if (value[i] < -1 || value[i] >= static_cast<int64_t>(call.plan.map.num_experts)) {
      if (!call.ignores_unknown) {
        const auto k = static_cast<int32_t>(place.k);
        raise_bad_token(call.me, place.epoch, FaultKind::kBadIndex, token, k, value[i]);
      }
      expert[i] = -1;
    }
    if (expert[i] >= 0 && place.is_nowhere(static_cast<uint32_t>(expert[i]))) {
      expert[i] = -1;
    }
    if (place.is_used && token < place.tokens.last) {
      const size_t route = static_cast<size_t>(token) * call.plan.map.max_topk + place.k;
      call.plan.route_expert()[route] = expert[i];
      if (call.weights != nullptr) {
        call.plan.route_weight()[route] = weight[i];
      }
    }
  }
}

// Counts, by one warp, a step's routes by expert. Returns in lane r their arrivals at rank r.
__device__ __forceinline__ uint32_t count_step(
    const PlanPlace& place,
    bool is_route,
    uint32_t expert,
    uint32_t target,
    uint32_t topk,
    uint32_t* counts
) {
  if (is_route) {
    atomicAdd(counts + place.num_ranks + expert, 1U);
  }
  const uint32_t pair = pair_lanes(place, is_route, target);
  return static_cast<uint32_t>(__popc(step_arrivals(place, pair, target, topk).lanes));
}

// Fills, by one warp, its row of shared.counts, which must be zero before.
__device__ inline void count_tokens(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared
) {
  constexpr int kBatch = 4;  // steps in flight; a guess
  uint32_t* counts = shared.counts + place.warp * place.columns;
  const auto topk = static_cast<uint32_t>(call.topk);
  uint32_t arrivals = 0;  // lane r: to rank r
  if (call.map != nullptr) {
    read_map(call, place);
    __syncwarp();
  }
  const auto batch_tokens = static_cast<int32_t>(kBatch * place.step);
  for (int32_t first = place.tokens.first; first < place.tokens.last; first += batch_tokens) {
    int32_t expert[kBatch];
    if (call.map == nullptr) {
      read_topk(call, place, first, expert);
    } else {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int32_t token = first + static_cast<int32_t>(i * place.step + place.group);
        const size_t route = static_cast<size_t>(token) * call.plan.map.max_topk + place.k;
        const bool is_here = place.is_used && token < place.tokens.last;
        expert[i] = is_here ? call.plan.route_expert()[route] : -1;
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + static_cast<int32_t>(i * place.step) >= place.tokens.last) {
        break;
      }
      const bool is_route = expert[i] >= 0;
      const auto column = static_cast<uint32_t>(expert[i]);
      const uint32_t target = is_route ? place.experts_per_rank.divide(column) : place.num_ranks;
      arrivals += count_step(place, is_route, column, target, topk, counts);
    }
  }
  if (place.lane < place.num_ranks) {
    counts[place.lane] = arrivals;
  }
}

}  // namespace weft
