// SPDX-License-Identifier: Apache-2.0
// The plan of a call of few tokens, made by some blocks of the grid of dispatch/fused.cu. Every
// rank sends its whole routing to all others and makes from all of it what concerns itself, so that
// ranks wait for each other only once:
//
//   routing to all ranks -> routing of all ranks, count -> shape -> slots, records of this rank
//
// A block plans for a part of one rank's tokens, as plan.cu plans for its own, and writes the
// records of the arrivals that come from there. Each block counts the routes of all ranks by
// itself; one more block writes the shape. A block executes most instructions once or twice, so
// that its time is that of fetching them: loops are not unrolled, except where several loads must
// be in flight together.
#pragma once

#include "cuda/device/wait.cuh"
#include "cuda/plan/group.cuh"
#include "cuda/plan/place_routes.cuh"
#include "cuda/plan/read_routing.cuh"
#include "cuda/plan/swap_counts.cuh"

namespace weft {

// 64 bits that hold a value and, in the upper half, the epoch of its call: who sees the epoch has
// the value, so that neither end needs a fence.
__device__ __forceinline__ void store_tagged(uint64_t* to, uint32_t epoch, uint32_t value) {
  ptx::store_relaxed_sys(to, uint64_t{epoch} << 32 | value);
}

__device__ __forceinline__ bool is_of_call(uint64_t word, uint32_t epoch) {
  return static_cast<uint32_t>(word >> 32) == epoch;
}

// One thread waits until *from is of the site's call; it returns 0 if the call is given up. The
// function is not inlined: it is called in many places, nearly always with the value there already.
__device__ __noinline__ uint64_t
await_tagged(const RankView& me, const uint64_t* from, const WaitSite& site) {
  // The handshakes are awaited elsewhere, and their timeout says more than one here: so this wait
  // is twice as long.
  constexpr uint32_t kPatience = 2;
  const uint64_t begin = ptx::nanoseconds();
  for (;;) {
    uint64_t seen = 0;
    for (int i = 0; i < 32; ++i) {
      seen = ptx::load_relaxed_sys(from);
      if (is_of_call(seen, site.epoch)) {
        return seen;
      }
    }
    if (is_stopped(me)) {
      return 0;
    }
    if (ptx::nanoseconds() - begin > kPatience * me.timeout_ns) {
      raise_timeout(me, site, static_cast<uint32_t>(seen >> 32), site.epoch);
      return 0;
    }
    __nanosleep(me.poll_ns);
  }
}

// One thread gets the value at `from`, where it has read `seen`. Returns false if the call is given
// up.
__device__ __forceinline__ bool wait_tagged(
    const RankView& me, const uint64_t* from, const WaitSite& site, uint64_t seen, uint32_t& value
) {
  if (!is_of_call(seen, site.epoch)) {
    seen = await_tagged(me, from, site);
  }
  value = static_cast<uint32_t>(seen);
  return is_of_call(seen, site.epoch);
}

// Where the routing of `source` lies in the memory of `rank`.
__device__ __forceinline__ uint64_t* routing_of(
    const RankView& me, int rank, uint32_t epoch, int source
) {
  const uint64_t offset = me.map.routing_offset(epoch, static_cast<uint32_t>(source));
  return reinterpret_cast<uint64_t*>(control_of(me, rank) + offset);
}

// All threads of a planning block send this rank's routing to the block's share of the ranks.
__device__ inline void send_routing(const PlanLaunch& call, uint32_t epoch) {
  constexpr int64_t kOutOfRange = INT32_MIN;
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
      const bool fits = expert >= -1 && expert < static_cast<int64_t>(call.plan.map.num_experts);
      const auto said = static_cast<uint32_t>(fits ? expert : kOutOfRange);
      store_tagged(to + RoutingMap::experts() + i, epoch, said);
      if (call.weights != nullptr) {
        store_tagged(to + map.weights() + i, epoch, __float_as_uint(__ldg(call.weights + i)));
      }
    }
  }
}

// A route out of range, as every rank finds it: the one whose it is says which.
__device__ __noinline__ void raise_bad_route(
    const PlanLaunch& call, const PlanPlace& place, int route
) {
  if (place.is_own(call.me)) {
    const int64_t value = given_expert(call.topk_idx, call.index_bytes, static_cast<size_t>(route));
    raise_bad_token(
        call.me, place.epoch, FaultKind::kBadIndex, route / call.topk, route % call.topk, value
    );
    return;
  }
  FaultRecord fault;
  fault.kind = FaultKind::kRefused;
  fault.op = Op::kPlan;
  fault.epoch = place.epoch;
  fault.peer = static_cast<int32_t>(place.source);
  raise_fault(call.me, fault);
}

// One warp reads the sizes of rank `from`; one of the warps that read its routes keeps them in
// shared.words. Returns the rank's number of routes, or -1 if the call is given up.
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
    DeviceWord& word = shared.words[site.peer];
    if (place.lane == RoutingMap::kNumTokens) {
      word.num_tokens = static_cast<int32_t>(tokens);
    } else {
      word.number = static_cast<int32_t>(value);
    }
  }
  return is_good ? static_cast<int>(tokens) * call.topk : -1;
}

// All threads, each warp for one rank at a time: everybody's sizes and routing, and the weights of
// the rank that is planned. False if the call is given up or a route is out of range.
__device__ inline bool read_all(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared
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
          kept[route] = static_cast<uint16_t>(number);
          if (is_planned) {
            shared.route_expert[route] = static_cast<int32_t>(number);
            shared.route_weight[route] = __uint_as_float(bits);
          }
          // -1 becomes 0.
          if (number + 1 > call.plan.map.num_experts) {
            is_good = false;
            if (is_planned) {
              raise_bad_route(call, place, route);
            }
          }
        }
      }
      __syncwarp();
    }
  }
  return __syncthreads_and(static_cast<int>(is_good)) != 0;
}

__device__ __forceinline__ EarlySlot* early_slots_of(const RankView& me, uint32_t source) {
  return reinterpret_cast<EarlySlot*>(control_of(me, me.rank) + me.map.early_slots_offset(source));
}

// One warp counts its share of a span of tokens of rank `from`.
__device__ __forceinline__ void count_span(
    const PlanLaunch& call,
    const PlanPlace& place,
    const PlanShared& shared,
    uint32_t from,
    const PartSpan& span,
    uint32_t* counts
) {
  constexpr uint32_t kNone = UINT16_MAX;
  const auto topk = static_cast<uint32_t>(call.topk);
  const auto step = static_cast<int32_t>(place.step);
  const PartSpan tokens = part_span(span.first, span.last, place.num_warps, place.warp);
  const uint16_t* experts = shared.experts_of(from);
  uint32_t arrivals = 0;  // lane r: to rank r
#pragma unroll 1
  for (int32_t first = tokens.first; first < tokens.last; first += step) {
    const uint32_t token = static_cast<uint32_t>(first) + place.group;
    const bool is_there = place.is_used && token < static_cast<uint32_t>(tokens.last);
    const uint32_t expert = is_there ? experts[token * topk + place.k] : kNone;
    const bool is_route = expert != kNone;
    const uint32_t target = is_route ? place.experts_per_rank.divide(expert) : place.num_ranks;
    arrivals += count_step(place, is_route, expert, target, topk, counts);
  }
  if (place.lane < place.num_ranks && arrivals > 0) {
    atomicAdd(counts + place.lane, arrivals);
    if (place.lane == static_cast<uint32_t>(call.me.rank)) {
      atomicAdd(shared.received + from, static_cast<int32_t>(arrivals));
    }
  }
}

// All threads count everybody's routes and leave the sums as accept_words() of swap_counts.cuh
// does. `part` is of the tokens of the rank that is planned.
__device__ inline void count_all(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared, const PartSpan& part
) {
  uint32_t* row = shared.counts + place.warp * place.columns;
#pragma unroll 1
  for (uint32_t i = 0; i < place.num_ranks + 2; ++i) {
    const uint32_t from = i < place.num_ranks ? i : place.source;
    PartSpan span = {0, shared.words[from].num_tokens};
    OtherCounts others = from < place.source ? kEarlierRanks : kLaterRanks;
    if (i == place.num_ranks) {
      span.last = part.first;
      others = kEarlierParts;
    } else if (i > place.num_ranks) {
      span.first = part.last;
      others = kLaterParts;
    }
    const bool is_part = i == place.source;
    uint32_t* counts = is_part ? row : shared.others + others * place.columns;
    count_span(call, place, shared, from, is_part ? part : span, counts);
  }
  sum_blocks(call, place, shared);
  for (uint32_t column = threadIdx.x; column < place.columns; column += blockDim.x) {
    const uint32_t* count = shared.others + column;
    const uint32_t before = count[kEarlierParts * place.columns];
    const uint32_t parts = before + count[kLaterParts * place.columns];
    const int32_t own = shared.own()[column] + static_cast<int32_t>(parts);
    const uint32_t earlier = count[kEarlierRanks * place.columns];
    shared.own()[column] = own;
    shared.before[column] = before;
    shared.earlier[column] = earlier;
    shared.total[column] = int64_t{earlier} + own + count[kLaterRanks * place.columns];
  }
  __syncthreads();
}

// All threads of a block that plans for one of `num_parts` parts of the tokens of place.source:
// until everybody's routes are counted. False if the call is given up.
__device__ inline bool count_for(
    const PlanLaunch& call,
    const PlanShared& shared,
    PlanPlace& place,
    uint32_t num_parts,
    uint32_t part_idx
) {
  place.num_blocks = 1;
  auto* counts = reinterpret_cast<uint4*>(shared.counts);
  const uint32_t num_vectors = place.num_warps * place.columns / 4;  // 16 warps
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < num_vectors; i += blockDim.x) {
    counts[i] = uint4{0, 0, 0, 0};
  }
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < kOtherCounts * place.columns; i += blockDim.x) {
    shared.others[i] = 0;
  }
  if (threadIdx.x < place.num_ranks) {
    const bool is_here = threadIdx.x == static_cast<uint32_t>(call.me.rank);
    shared.received[threadIdx.x] = 0;
    shared.blocks[threadIdx.x] = is_here ? call.plan.data : nullptr;
  }
  if (!read_all(call, place, shared)) {
    return false;
  }
  place.num_tokens = shared.words[place.source].num_tokens;
  const PartSpan part = part_span(0, place.num_tokens, num_parts, part_idx);
  place.tokens = part_span(part.first, part.last, place.num_warps, place.warp);
  place.route_expert = shared.route_expert;
  place.route_weight = shared.route_weight;
  place.stride = static_cast<uint32_t>(call.topk);
  count_all(call, place, shared, part);
  return true;
}

// One warp writes the routing of its tokens into the plan.
__device__ inline void keep_routing(const PlanLaunch& call, const PlanPlace& place) {
  const auto step = static_cast<int32_t>(place.step);
#pragma unroll 1
  for (int32_t first = place.tokens.first; first < place.tokens.last; first += step) {
    const LaneRoute route = load_route(call, place, first);
    if (place.is_used && route.token < place.tokens.last) {
      const size_t at = static_cast<size_t>(route.token) * call.plan.map.max_topk + place.k;
      call.plan.route_expert()[at] = route.expert;
      if (call.has_weights) {
        call.plan.route_weight()[at] = route.weight;
      }
    }
  }
}

// What LocalState::grid counts to: one when the shape is written, one when the handshakes of all
// ranks are accepted.
inline constexpr uint32_t kRoutedPlanParts = 2;

// One thread waits until both are done. Returns false if the call is given up.
__device__ inline bool await_parts(const RankView& me, uint32_t epoch) {
  const WaitSite site = {Op::kPlan, epoch, me.rank, WaitFor::kGrid};
  return wait_reached(me, &me.local->grid, kRoutedPlanParts, site, 2);
}

// All threads of a block write the shape and this rank's routing. Returns false if the call is
// given up.
__device__ inline bool plan_shape(
    const PlanLaunch& call, const PlanShared& shared, PlanPlace place
) {
  bool is_made = count_for(call, shared, place, 1, 0);
  if (is_made) {
    publish_shape(call, shape_group(call, place, shared), place, shared);
    keep_routing(call, place);
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::add_acq_rel_gpu(&call.me.local->grid, 1);
      is_made = await_parts(call.me, place.epoch);
    }
    is_made = __syncthreads_and(static_cast<int>(is_made)) != 0;
  }
  if (!is_made) {
    clear_plan(call);
  }
  return is_made;
}

// All threads of a block: the records of what a part of the tokens of place.source makes here, and
// what this rank keeps of its own tokens. False if the call is given up.
__device__ inline bool plan_records(
    const PlanLaunch& call, const PlanShared& shared, PlanPlace place, uint32_t part_idx
) {
  const RankView& me = call.me;
  place.writes_tokens = place.is_own(me);
  place.early_slots = early_slots_of(me, place.source);
  const auto num_parts = static_cast<uint32_t>(call.num_parts);
  if (!count_for(call, shared, place, num_parts, part_idx)) {
    return false;
  }
  shape_group(call, place, shared);
  close_chunks(call, place, shared);
  place_tokens(call, place, shared);
  __syncthreads();
  const uint32_t num_jobs = place.num_ranks * num_parts;
  if (threadIdx.x == 0 && ptx::add_acq_rel_gpu(&me.local->placed, 1) == num_jobs - 1) {
    ptx::fence_gpu();
    for (uint32_t rank = 0; rank < place.num_ranks; ++rank) {
      ptx::store_relaxed_sys(signal_of(me, me.rank, me.map.signals().records(rank)), place.epoch);
    }
  }
  return true;
}

// One thread of another block waits until the records are there, and for what await_parts() waits
// for. Returns false if the call is given up.
__device__ inline bool await_plan(const PlanLaunch& call, uint32_t epoch) {
  const RankView& me = call.me;
  const WaitSite site = {Op::kPlan, epoch, me.rank, WaitFor::kGrid};
  const auto num_jobs = static_cast<uint32_t>(me.num_ranks * call.num_parts);
  return wait_reached(me, &me.local->placed, num_jobs, site, 2) && await_parts(me, epoch);
}

// All threads of the first call.num_blocks blocks, after send_routing(). It stops where the call is
// given up.
__device__ inline void make_routed_plan(
    const PlanLaunch& call, uint32_t epoch, const PlanShared& shared
) {
  PlanPlace place = plan_place(call, epoch);
  bool is_made = true;
  const int num_jobs = call.me.num_ranks * call.num_parts + 1;
#pragma unroll 1
  for (int job = static_cast<int>(blockIdx.x); job < num_jobs && is_made; job += call.num_blocks) {
    if (job == 0) {
      is_made = plan_shape(call, shared, place);
    } else {
      place.source = static_cast<uint32_t>((job - 1) % call.me.num_ranks);
      is_made =
          plan_records(call, shared, place, static_cast<uint32_t>((job - 1) / call.me.num_ranks));
      place.source = static_cast<uint32_t>(call.me.rank);
    }
    __syncthreads();
  }
}

// One warp of the grid, with `word` in shared memory, sends and awaits the handshakes of the call,
// as every call does. It tells the planning blocks when they are accepted.
__device__ inline void accept_plan_words(const PlanLaunch& call, uint32_t epoch, DeviceWord& word) {
  const RankView& me = call.me;
  const int peer = lane_index();
  if (peer == 0) {
    write_word(call, word);
    if (is_stopped(me)) {
      word.status = WordStatus::kRefused;
    }
  }
  __syncwarp();
  bool is_good = true;
  if (peer < me.num_ranks) {
    post_word(me, epoch, word, peer);
    DeviceWord said;
    is_good = accept_word(me, epoch, word, peer, said);
  }
  if (__all_sync(kAllLanes, is_good) && peer == 0) {
    ptx::add_acq_rel_gpu(&me.local->grid, 1);
  }
}

}  // namespace weft
