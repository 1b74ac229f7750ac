// SPDX-License-Identifier: Apache-2.0
// Targets to which the push role of dispatch (push.cuh) sends each token: by the plan
// (PlannedRoutes) or, for eager rows, by the routing alone (EagerRoutes), with replicas by the
// routes that a plan in the making already has (BalancedRoutes).
#pragma once

#include "cuda/device/lanes.cuh"
#include "cuda/device/row_mover.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// Targets of one token, spread over the lanes. Lane j knows the j-th rank after this one (the last
// is this one), so that ranks do not all write to the same peer first; lane k knows route k.
struct TokenRoutes {
  int32_t primary = -1;   // slot on the lane's rank
  int32_t arrival = -1;   // number of the arrival there
  int32_t own_slot = -1;  // slot of route `lane` if its expert is this rank's
};

// Returns the rank that this lane stands for, if the lane is below num_ranks.
__device__ __forceinline__ int peer_of_lane(const RankView& me) {
  const int next = me.rank + 1 + lane_index();
  return next >= me.num_ranks ? next - me.num_ranks : next;
}

class PlannedRoutes {
 public:
  static constexpr bool kIsEager = false;

  // The plan's entries for a chunk's tokens, spread as in TokenRoutes. They are not read until the
  // preceding chunk is done, so that no warp waits for the loads.
  struct Chunk {
    int32_t primary[kMaxChunkTokens];
    int32_t arrival[kMaxChunkTokens];
    int32_t expert[kMaxChunkTokens];
    int32_t slot[kMaxChunkTokens];
  };

  __device__ explicit PlannedRoutes(const DispatchLaunch& call)
      : call_(call), me_(call.me), peer_(peer_of_lane(call.me)) {
    local_experts_ = static_cast<int>(call.plan.map.experts_per_rank.divisor());
    max_topk_ = static_cast<int>(call.plan.map.max_topk);
  }

  [[nodiscard]] __device__ __forceinline__ int num_tokens() const {
    return call_.plan.header()->num_tokens;
  }

  // Loads what the plan says of `count` tokens from `begin` on.
  [[nodiscard]] __device__ __forceinline__ Chunk load(int begin, int count) const {
    const PlanView& plan = call_.plan;
    const int lane = lane_index();
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      const int64_t pair = static_cast<int64_t>(begin + i) * me_.num_ranks + peer_;
      const int64_t route = static_cast<int64_t>(begin + i) * max_topk_ + lane;
      const bool is_rank = i < count && lane < me_.num_ranks;
      const bool is_route = i < count && lane < call_.topk;
      chunk.primary[i] = is_rank ? plan.primary()[pair] : -1;
      chunk.arrival[i] = is_rank ? plan.arrival()[pair] : -1;
      chunk.expert[i] = is_route ? plan.route_expert()[route] : -1;
      chunk.slot[i] = is_route ? plan.route_slot()[route] : -1;
    }
    return chunk;
  }

  [[nodiscard]] __device__ __forceinline__ TokenRoutes at(const Chunk& chunk, int i) const {
    TokenRoutes routes;
    routes.primary = pick(chunk.primary, i);
    routes.arrival = pick(chunk.arrival, i);
    const int32_t expert = pick(chunk.expert, i) - me_.rank * local_experts_;
    const int32_t slot = pick(chunk.slot, i);
    if (call_.one_row) {
      routes.own_slot = peer_ == me_.rank && lane_index() < me_.num_ranks ? routes.primary : -1;
    } else {
      routes.own_slot = expert >= 0 && expert < local_experts_ ? slot : -1;
    }
    return routes;
  }

 private:
  const DispatchLaunch& call_;
  const RankView& me_;
  int peer_;
  int local_experts_;
  int max_topk_;
};

// Targets of eager rows, by the routing and without a plan: each rank that has one of a token's
// experts, this one included, and there the place of the token's number. A route out of range goes
// nowhere; the plan refuses it.
class EagerRoutes {
 public:
  static constexpr bool kIsEager = true;

  struct Chunk {
    int32_t token;  // the only one; -1 where it does not go to the lane's rank
  };

  __device__ explicit EagerRoutes(const DispatchLaunch& call)
      : call_(call), me_(call.me), peer_(peer_of_lane(call.me)) {}

  [[nodiscard]] __device__ __forceinline__ int num_tokens() const { return call_.num_tokens; }

  [[nodiscard]] __device__ __forceinline__ Chunk load(int begin, int /*count*/) const {
    int64_t expert = -1;
    if (const int lane = lane_index(); lane < call_.topk) {
      const int route = begin * call_.topk + lane;
      expert = given_expert(call_.topk_idx, call_.index_bytes, static_cast<size_t>(route));
    }
    const bool is_route = expert >= 0 && expert < me_.map.num_experts;
    const uint32_t local_experts = me_.map.num_experts / static_cast<uint32_t>(me_.num_ranks);
    const uint32_t owner = is_route ? static_cast<uint32_t>(expert) / local_experts : 0;
    return to_owners(begin, is_route, owner);
  }

  [[nodiscard]] __device__ __forceinline__ TokenRoutes at(const Chunk& chunk, int /*i*/) const {
    return {chunk.token, chunk.token, -1};
  }

 protected:
  // `owner`: the rank that the lane's route goes to, if `is_route`.
  [[nodiscard]] __device__ __forceinline__ Chunk
  to_owners(int token, bool is_route, uint32_t owner) const {
    const uint32_t ranks = __reduce_or_sync(kAllLanes, is_route ? 1U << owner : 0U);
    const bool goes_there =
        lane_index() < me_.num_ranks && (ranks >> static_cast<uint32_t>(peer_) & 1U) != 0;
    return {goes_there ? token : -1};
  }

  const DispatchLaunch& call_;
  const RankView& me_;
  int peer_;
};

// Targets of eager rows where popular experts have replicas: by this rank's routes to physical
// experts, which the plan has before all else (tell_routes of plan/fused.cuh).
class BalancedRoutes : public EagerRoutes {
 public:
  using EagerRoutes::EagerRoutes;

  [[nodiscard]] __device__ __forceinline__ Chunk load(int begin, int /*count*/) const {
    const PlanMap& map = call_.plan.map;
    int32_t expert = -1;
    if (const int lane = lane_index(); lane < call_.topk) {
      expert = call_.plan.route_expert()[begin * static_cast<int>(map.max_topk) + lane];
    }
    const bool is_route = expert >= 0;
    const auto physical = static_cast<uint32_t>(is_route ? expert : 0);
    return to_owners(begin, is_route, map.experts_per_rank.divide(physical));
  }
};

}  // namespace weft
