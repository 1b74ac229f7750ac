// SPDX-License-Identifier: Apache-2.0
// Last part of the plan kernel: a warp gives its routes their slots, writes the records of its
// arrivals straight into the receivers' plan blocks, and what the tokens' own rank keeps into its
// own plan. Beside a dispatch (fused.cuh) the slots come first, since rows wait for them. Before:
// group.cuh; after: the kernels of dispatch/ and combine/.
#pragma once

#include "cuda/plan/read_routing.cuh"
#include "cuda/plan/shared.cuh"
#include "plan/slots.hpp"

namespace weft {

// One lane's route in a step; a lane without a route has expert -1 and target num_ranks.
struct LaneRoute {
  int32_t token = 0;
  int32_t expert = -1;
  float weight = 0.0F;
  uint32_t target = 0;
  uint32_t pair = 0;         // lanes of its arrival
  uint32_t arrival = 0;      // number of its arrival in the pair (this rank, target)
  uint32_t lower_ranks = 0;  // receivers of the token before `target`
  int32_t slot = -1;

  [[nodiscard]] __device__ bool is_route() const { return expert >= 0; }
};

// Facts that one lane learns from the other routes of its token.
struct TokenNeighbours {
  uint32_t place = 0;            // of the route among the kept ones of its arrival
  uint32_t lowest = 0xffffffff;  // slot of the arrival; all ones: none kept
};

__device__ __forceinline__ TokenNeighbours
token_neighbours(const PlanPlace& place, const LaneRoute& route, uint32_t topk) {
  TokenNeighbours out;
  const auto slot = static_cast<uint32_t>(route.slot);  // dropped: behind all
  const uint32_t first = place.group * topk;
#pragma unroll 4
  for (uint32_t k = 0; k < topk; ++k) {
    const uint32_t lane = (first + k) % kPlanLanes;
    const uint32_t other = __shfl_sync(kAllLanes, slot, lane);
    if ((route.pair >> lane & 1U) != 0) {
      out.place += other < slot || (other == slot && k < place.k) ? 1U : 0U;
      out.lowest = min(out.lowest, other);
    }
  }
  return out;
}

// Writes rows of `primary` and `arrival` and the chunk begins of the step's tokens. Lane r's
// `lanes` and `next`: first lanes of rank r's arrivals, and the number of the first of these.
__device__ __forceinline__ void write_pairs(
    const PlanLaunch& call,
    const PlanPlace& place,
    const PlanShared& shared,
    int32_t first_token,
    uint32_t lanes,
    uint32_t next
) {
  const auto topk = static_cast<uint32_t>(call.topk);
  const auto left = static_cast<uint32_t>(place.tokens.last - first_token);
  const uint32_t num_pairs = min(left, place.step) * place.num_ranks;
  const auto chunk_mask = static_cast<uint32_t>(chunk_tokens(place.num_tokens)) - 1;
  const auto chunk_shift = static_cast<uint32_t>(__popc(chunk_mask));
  const size_t first_pair = static_cast<size_t>(first_token) * place.num_ranks;
  for (uint32_t base = 0; base < num_pairs; base += kPlanLanes) {
    const uint32_t pair = base + place.lane;
    const uint32_t group = call.plan.map.by_ranks.divide(pair);
    const uint32_t rank = call.plan.map.by_ranks.remainder(pair, group);
    const uint32_t firsts = __shfl_sync(kAllLanes, lanes, rank);
    const uint32_t begin = __shfl_sync(kAllLanes, next, rank);
    if (pair >= num_pairs) {
      continue;
    }
    const uint32_t below = group * topk;
    const auto number = static_cast<int32_t>(begin) + __popc(firsts & low_lanes(below));
    const bool is_arrival = (firsts >> below & low_lanes(topk)) != 0;
    if (place.writes_tokens) {
      call.plan.arrival()[first_pair + pair] = is_arrival ? number : -1;
      if (!is_arrival) {
        call.plan.primary()[first_pair + pair] = -1;  // else the arrival's first lane writes it
      }
    }
    const uint32_t token = static_cast<uint32_t>(first_token) + group;
    if ((token & chunk_mask) == 0 && shared.blocks[rank] != nullptr) {
      const uint64_t begins = call.plan.map.chunk_begin(place.source);
      reinterpret_cast<int32_t*>(shared.blocks[rank] + begins)[token >> chunk_shift] = number;
    }
  }
}

// Writes the record of one route, and that of its arrival by the arrival's first lane.
__device__ __forceinline__ void write_record(
    const PlanLaunch& call,
    const PlanPlace& place,
    const PlanShared& shared,
    const LaneRoute& route,
    const TokenNeighbours& neighbours,
    uint32_t kept_lanes
) {
  const PlanMap& map = call.plan.map;
  std::byte* block = shared.blocks[route.target];
  if ((route.pair & low_lanes(place.lane)) == 0) {
    const auto most = min(place.num_ranks, static_cast<uint32_t>(call.topk));
    int4 head;  // an ArrivalHead
    head.x = route.token;
    head.y = __popc(kept_lanes & route.pair);
    head.z = route.token * static_cast<int32_t>(most) + static_cast<int32_t>(route.lower_ranks);
    head.w = 0;
    if (block != nullptr) {
      reinterpret_cast<int4*>(block + map.heads(place.source))[route.arrival] = head;
    }
    if (place.writes_tokens) {
      const size_t pair = static_cast<size_t>(route.token) * place.num_ranks + route.target;
      call.plan.primary()[pair] = static_cast<int32_t>(neighbours.lowest);
    }
  }
  if (route.slot >= 0 && block != nullptr) {
    const auto local =
        static_cast<uint32_t>(route.expert) - route.target * place.experts_per_rank.divisor();
    const size_t at =
        static_cast<size_t>(route.arrival) * call.plan.map.max_topk + neighbours.place;
    reinterpret_cast<int32_t*>(block + map.slots(place.source))[at] = route.slot;
    reinterpret_cast<int32_t*>(block + map.origins(place.source))[at] =
        static_cast<int32_t>(local << 8 | place.k);
    if (call.has_weights) {
      reinterpret_cast<float*>(block + map.weights(place.source))[at] = route.weight;
    }
  }
}

// Writes where the eager rows of the step's tokens go on this rank: kept routes first, by slot.
__device__ __forceinline__ void write_eager_slots(
    const PlanLaunch& call,
    const PlanPlace& place,
    const LaneRoute& route,
    const TokenNeighbours& neighbours
) {
  const auto topk = static_cast<uint32_t>(call.topk);
  const bool is_kept = route.slot >= 0 && route.target == static_cast<uint32_t>(call.me.rank);
  const uint32_t of_token = low_lanes(topk) << place.group * topk;
  const uint32_t kept = __ballot_sync(kAllLanes, is_kept) & of_token;
  const uint32_t others = of_token & ~kept & low_lanes(place.lane);
  const auto behind = static_cast<uint32_t>(__popc(kept) + __popc(others));
  if (place.is_used && route.token < place.tokens.last) {
    const uint32_t at =
        static_cast<uint32_t>(route.token) * topk + (is_kept ? neighbours.place : behind);
    const uint32_t first_expert = route.target * place.experts_per_rank.divisor();
    const uint32_t local = static_cast<uint32_t>(route.expert) - first_expert;
    const auto origin = static_cast<int32_t>(local << 8 | place.k);
    const int2 entry = is_kept ? int2{route.slot, origin} : int2{-1, 0};
    *reinterpret_cast<int2*>(place.eager_slots + at) = entry;
  }
}

// Loads, by each lane, expert and weight of its route in the step that begins at `first`.
__device__ __forceinline__ LaneRoute
load_route(const PlanLaunch& call, const PlanPlace& place, int32_t first) {
  LaneRoute route;
  route.token = first + static_cast<int32_t>(place.group);
  if (place.is_used && route.token < place.tokens.last) {
    const size_t at = static_cast<size_t>(route.token) * place.stride + place.k;
    if (place.short_expert == nullptr) {
      route.expert = place.route_expert[at];
    } else {
      const uint16_t expert = place.short_expert[at];
      route.expert = expert == kNoShortExpert ? -1 : expert;
    }
    if (call.has_weights) {
      route.weight = place.route_weight[at];
    }
  }
  return route;
}

// Returns the slot of each lane's route; layouts by expert count on in the warp's row of `counts`.
__device__ __forceinline__ int32_t place_route(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared, const LaneRoute& route
) {
  if (call.layout == Layout::kRankMajor) {
    return route.is_route() ? shared.runs[route.target].slot(route.arrival) : -1;
  }
  const uint32_t alone = 1U << 31 | place.lane;
  const auto expert = static_cast<uint32_t>(route.expert);
  const uint32_t same = __match_any_sync(kAllLanes, route.is_route() ? expert : alone);
  const uint32_t lower = same & low_lanes(place.lane);
  const uint32_t column = place.num_ranks + (route.is_route() ? expert : 0U);
  uint32_t* count = shared.counts + place.warp * place.columns + column;
  const uint32_t begin = *count;
  __syncwarp();
  if (route.is_route() && lower == 0) {
    *count = begin + static_cast<uint32_t>(__popc(same));
  }
  __syncwarp();
  const uint32_t number = begin + static_cast<uint32_t>(__popc(lower));
  return route.is_route() ? shared.runs[column].slot(number) : -1;
}

// Returns, in lane r, the number of the warp's first arrival at rank r.
__device__ __forceinline__ uint32_t
first_arrival(const PlanPlace& place, const PlanShared& shared) {
  const uint32_t* counts = shared.counts + place.warp * place.columns;
  return place.lane < place.num_ranks ? shared.before[place.lane] + counts[place.lane] : 0;
}

// Finds the target and the arrival of each lane's route in a step. Lane r has in `next` the number
// of the next arrival at rank r; returns to it the lanes that are first of their token to rank r.
__device__ __forceinline__ uint32_t
find_arrivals(const PlanPlace& place, LaneRoute& route, uint32_t topk, uint32_t next) {
  const auto expert = static_cast<uint32_t>(route.expert);
  route.target = route.is_route() ? place.experts_per_rank.divide(expert) : place.num_ranks;
  route.pair = pair_lanes(place, route.is_route(), route.target);
  const StepArrivals arrivals = step_arrivals(place, route.pair, route.target, topk);
  route.lower_ranks = arrivals.lower_ranks;
  const uint32_t of_target = __shfl_sync(kAllLanes, arrivals.lanes, route.target % kPlanLanes);
  route.arrival = __shfl_sync(kAllLanes, next, route.target % kPlanLanes) +
                  static_cast<uint32_t>(__popc(of_target & low_lanes(place.group * topk)));
  return arrivals.lanes;
}

// Writes, by one warp, the records of its tokens' arrivals. slot_of(route) is the lane's route's
// slot.
template <class SlotOf>
__device__ __forceinline__ void write_records(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared, const SlotOf& slot_of
) {
  const auto topk = static_cast<uint32_t>(call.topk);
  uint32_t next = first_arrival(place, shared);
  const auto step = static_cast<int32_t>(place.step);
  LaneRoute following = load_route(call, place, place.tokens.first);
  for (int32_t first = place.tokens.first; first < place.tokens.last; first += step) {
    LaneRoute route = following;
    following = load_route(call, place, first + step);
    const uint32_t firsts = find_arrivals(place, route, topk, next);
    route.slot = slot_of(route);

    const TokenNeighbours neighbours = token_neighbours(place, route, topk);
    const uint32_t kept_lanes = __ballot_sync(kAllLanes, route.slot >= 0);
    if (place.is_used && place.writes_tokens && route.token < place.tokens.last) {
      const size_t at = static_cast<size_t>(route.token) * call.plan.map.max_topk + place.k;
      call.plan.route_slot()[at] = route.slot;
    }
    if (route.is_route()) {
      write_record(call, place, shared, route, neighbours, kept_lanes);
    }
    __syncwarp();
    write_pairs(call, place, shared, first, firsts, next);
    next += static_cast<uint32_t>(__popc(firsts));
  }
}

// Gives, by one warp, its tokens' routes their slots and writes the records of their arrivals.
__device__ inline void place_tokens(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared
) {
  write_records(call, place, shared, [&](const LaneRoute& route) {
    return place_route(call, place, shared, route);
  });
}

// Does the first of two parts of place_tokens(): finds where rows go, and leaves the routes' slots
// in shared.route_slot.
__device__ inline void place_eager_rows(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared
) {
  const auto topk = static_cast<uint32_t>(call.topk);
  uint32_t next = first_arrival(place, shared);
  const auto step = static_cast<int32_t>(place.step);
#pragma unroll 1
  for (int32_t first = place.tokens.first; first < place.tokens.last; first += step) {
    LaneRoute route = load_route(call, place, first);
    next += static_cast<uint32_t>(__popc(find_arrivals(place, route, topk, next)));
    route.slot = place_route(call, place, shared, route);
    write_eager_slots(call, place, route, token_neighbours(place, route, topk));
    if (place.is_used && route.token < place.tokens.last) {
      shared.route_slot[route.token * topk + place.k] = route.slot;
    }
    __syncwarp();
  }
}

// Does the second part: writes the records.
__device__ inline void write_eager_records(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared
) {
  const auto topk = static_cast<uint32_t>(call.topk);
  write_records(call, place, shared, [&](const LaneRoute& route) {
    return route.is_route() ? shared.route_slot[route.token * topk + place.k] : -1;
  });
}

// Writes the end of the last chunk of tokens at every receiver, by all threads of one block.
__device__ inline void close_chunks(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared
) {
  const uint32_t rank = threadIdx.x;
  if (rank < place.num_ranks && shared.blocks[rank] != nullptr) {
    const uint64_t offset = call.plan.map.chunk_begin(place.source);
    auto* chunk_begin = reinterpret_cast<int32_t*>(shared.blocks[rank] + offset);
    chunk_begin[num_device_chunks(place.num_tokens)] = shared.own()[rank];
  }
}

}  // namespace weft
