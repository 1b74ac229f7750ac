// SPDX-License-Identifier: Apache-2.0
// First part of a plan that every rank makes from all ranks' routing (fused.cuh): this rank's
// routing goes to every rank, and all ranks' routing comes in. Values travel together with the
// epoch of their call. dispatch/eager.cuh reads sizes in the same way.
#pragma once

#include "cuda/device/tagged.cuh"
#include "cuda/plan/read_routing.cuh"
#include "cuda/plan/shared.cuh"

namespace weft {

// Experts that tokens choose among: all, or the masters where there are replicas.
struct ChosenExperts {
  uint32_t count;
  const FastDivide& per_rank;
};

// Sends this rank's routing to the block's share of the ranks, by all threads of a planning block.
// `num_experts`: ChosenExperts::count.
__device__ inline void send_routing(const PlanLaunch& call, uint32_t epoch, uint32_t num_experts) {
  const int64_t unknown = call.ignores_unknown ? -1 : INT32_MIN;
  const RankView& me = call.me;
  const RoutingMap map = me.map.routing();
  const int count = call.num_tokens * call.topk;
  for (int peer = static_cast<int>(blockIdx.x); peer < me.num_ranks; peer += call.num_blocks) {
    uint64_t* to = routing_of(me, peer, epoch, me.rank);
    if (threadIdx.x == 0) {
      const int64_t budget = min(call.row_budget, int64_t{INT32_MAX});
      store_tagged(to + RoutingMap::kNumTokens, epoch, static_cast<uint32_t>(call.num_tokens));
      store_tagged(to + RoutingMap::kRowBudget, epoch, static_cast<uint32_t>(budget));
    }
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      const int64_t expert = given_expert(call.topk_idx, call.index_bytes, static_cast<size_t>(i));
      const bool fits = expert >= -1 && expert < static_cast<int64_t>(num_experts);
      const auto said = static_cast<uint32_t>(fits ? expert : unknown);
      store_tagged(to + RoutingMap::experts() + i, epoch, said);
      if (call.weights != nullptr) {
        store_tagged(to + map.weights() + i, epoch, __float_as_uint(__ldg(call.weights + i)));
      }
    }
  }
}

// Reports a route out of range, which every rank finds; only its own rank says which it is.
__device__ __noinline__ void raise_bad_route(
    const PlanLaunch& call, const PlanPlace& place, int source, int route
) {
  if (source == call.me.rank) {
    const int64_t value = given_expert(call.topk_idx, call.index_bytes, static_cast<size_t>(route));
    raise_bad_token(
        call.me, place.epoch, FaultKind::kBadIndex, route / call.topk, route % call.topk, value
    );
    return;
  }
  const FaultRecord fault = {
      .kind = FaultKind::kRefused, .op = Op::kPlan, .epoch = place.epoch, .peer = source};
  raise_fault(call.me, fault);
}

// Reads, by one warp, the sizes of rank site.peer; one of the warps that read the rank's routes
// keeps them in shared.words. Returns its number of routes, or -1 if the call is given up.
__device__ __forceinline__ int read_sizes(
    const PlanLaunch& call,
    const PlanPlace& place,
    const PlanShared& shared,
    const WaitSite& site,
    const uint64_t* routing,
    bool keeps_them
) {
  const uint64_t* from = routing + (place.lane == RoutingMap::kRowBudget ? RoutingMap::kRowBudget
                                                                         : RoutingMap::kNumTokens);
  uint32_t value = 0;
  bool is_good = wait_tagged(call.me, from, site, ptx::load_relaxed_sys(from), value);
  __syncwarp();
  const uint32_t tokens = __shfl_sync(kAllLanes, value, RoutingMap::kNumTokens);
  is_good = __all_sync(kAllLanes, is_good) && tokens <= call.plan.map.max_tokens;
  if (keeps_them && place.lane < RoutingMap::kFields) {
    DeviceHandshake& word = shared.words[site.peer];
    if (place.lane == RoutingMap::kNumTokens) {
      word.num_tokens = static_cast<int32_t>(tokens);
    } else {
      word.number = static_cast<int32_t>(value);
    }
  }
  return is_good ? static_cast<int>(tokens) * call.topk : -1;
}

// Reads all ranks' sizes and routing, and the weights of the planned rank: all threads, each warp
// for one rank at a time. Returns false if the call is given up or a route is out of range.
__device__ inline bool read_all(
    const PlanLaunch& call,
    const PlanPlace& place,
    const PlanShared& shared,
    const ChosenExperts& chosen
) {
  constexpr int kBatch = 4;  // loads in flight; a guess
  const RankView& me = call.me;
  const uint32_t at_once = min(place.num_ranks, place.num_warps);
  const uint32_t warps = place.num_warps / at_once;  // of one rank
  const uint32_t in_rank = place.warp / at_once;
  const auto stride = static_cast<int>(warps * kPlanLanes);
  const auto begin = static_cast<int>(in_rank * kPlanLanes + place.lane);
  bool is_good = true;
#pragma unroll 1
  for (uint32_t from = place.warp % at_once; from < place.num_ranks && in_rank < warps;
       from += at_once) {
    const auto rank = static_cast<int>(from);
    if (place.is_lost(from)) {
      if (in_rank == 0 && place.lane == 0) {
        shared.words[from].num_tokens = 0;
        shared.words[from].number = 0;
      }
      continue;
    }
    const uint64_t* routing = routing_of(me, me.rank, place.epoch, rank);
    const uint64_t* experts = routing + RoutingMap::experts();
    const uint64_t* weights = routing + me.map.routing().weights();
    const WaitSite site = {Op::kPlan, place.epoch, rank, WaitFor::kRouting};
    const bool is_planned = from == place.source;
    const bool has_weights = call.has_weights && is_planned;
    uint16_t* kept = shared.experts_of(from);
    auto count = static_cast<int>(shared.num_routes);  // until it is known
    bool is_sized = false;
#pragma unroll 1
    for (int first = begin; first - begin < count; first += kBatch * stride) {
      uint64_t expert[kBatch];
      uint64_t weight[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int route = first + i * stride;
        expert[i] = route < count ? ptx::load_relaxed_sys(experts + route) : 0;
        weight[i] = route < count && has_weights ? ptx::load_relaxed_sys(weights + route) : 0;
      }
      if (!is_sized) {
        is_sized = true;
        count = read_sizes(call, place, shared, site, routing, in_rank == 0);
        is_good = is_good && count >= 0;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int route = first + i * stride;
        if (route < count && is_good) {
          uint32_t number = 0;
          uint32_t bits = 0;
          is_good = wait_tagged(me, experts + route, site, expert[i], number) &&
                    (!has_weights || wait_tagged(me, weights + route, site, weight[i], bits));
          const bool is_nowhere =
              number < chosen.count && place.is_nowhere(number, chosen.per_rank);
          kept[route] = is_nowhere ? kNoShortExpert : static_cast<uint16_t>(number);
          if (is_planned) {
            shared.route_weight[route] = __uint_as_float(bits);
          }
          // -1 becomes 0.
          if (number + 1 > chosen.count) {
            is_good = false;
            raise_bad_route(call, place, rank, route);
          }
        }
      }
      __syncwarp();
    }
  }
  return __syncthreads_and(static_cast<int>(is_good)) != 0;
}

}  // namespace weft
