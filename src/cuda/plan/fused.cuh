// SPDX-License-Identifier: Apache-2.0
// The plan of a call of few tokens, made by some blocks of the grid of dispatch/fused.cu. Every
// rank sends its whole routing to all others and makes its own part of the plan from all routing,
// so that ranks wait for each other only once:
//
//   routing to all ranks -> routing of all ranks, count -> shape -> slots, records of this rank
//
// A block plans for a part of one rank's tokens, as plan.cu does for its own rank, and writes first
// the slots, for which rows wait, then the records of the tokens' arrivals. Each block counts the
// routes of all ranks by itself; one more block writes the shape. A block executes most
// instructions once or twice, so that its time is that of fetching them: loops are not unrolled,
// except where several loads must be in flight together. swap_routing.cuh has the first step.
//
// Each block also plans the replicas of popular experts, if there are any, between reading and
// counting (balance/fused.cuh): all routes become those to physical experts. Only then it is known
// where rows go; the block that writes the shape tells the pushing blocks.
#pragma once

#include "cuda/device/wait.cuh"
#include "cuda/plan/group.cuh"
#include "cuda/plan/place_routes.cuh"
#include "cuda/plan/swap_counts.cuh"
#include "cuda/plan/swap_routing.cuh"

namespace weft {

__device__ __forceinline__ EagerSlot* eager_slots_of(const RankView& me, uint32_t source) {
  return reinterpret_cast<EagerSlot*>(control_of(me, me.rank) + me.map.eager_slots_offset(source));
}

// Returns the warp's share of a span of tokens.
__device__ __forceinline__ PartSpan warp_tokens(const PartSpan& span, const PlanPlace& place) {
  constexpr uint32_t kWarps = kRoutedThreads / kPlanLanes;  // known here, so that nothing divides
  return part_span(span.first, span.last, kWarps, place.warp);
}

// Counts, by one warp, its share of a span of tokens of rank `from`.
__device__ __forceinline__ void count_span(
    const PlanLaunch& call,
    const PlanPlace& place,
    const PlanShared& shared,
    uint32_t from,
    const PartSpan& span,
    uint32_t* counts
) {
  const auto topk = static_cast<uint32_t>(call.topk);
  const auto step = static_cast<int32_t>(place.step);
  const PartSpan tokens = warp_tokens(span, place);
  const uint16_t* experts = shared.experts_of(from);
  uint32_t arrivals = 0;  // lane r: to rank r
#pragma unroll 1
  for (int32_t first = tokens.first; first < tokens.last; first += step) {
    const uint32_t token = static_cast<uint32_t>(first) + place.group;
    const bool is_there = place.is_used && token < static_cast<uint32_t>(tokens.last);
    const uint32_t expert = is_there ? experts[token * topk + place.k] : kNoShortExpert;
    const bool is_route = expert != kNoShortExpert;
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

// Counts, by all threads, all ranks' routes and leaves the sums as accept_words() of
// swap_counts.cuh does. `part` is of the planned rank's tokens.
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
    if (span.first == span.last) {
      continue;
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

// Experts that a block plans for: those that tokens choose. With replicas BalancedExperts of
// balance/fused.cuh is used instead.
struct PlainExperts {
  static constexpr bool kIsBalanced = false;

  const PlanLaunch& call;

  [[nodiscard]] __device__ ChosenExperts chosen() const {
    return {call.plan.map.num_experts, call.plan.map.experts_per_rank};
  }
  __device__ void settle(const PlanPlace& /*place*/, const PlanShared& /*shared*/) const {}
};

// Reads and counts all ranks' routes, by all threads of a block that plans for one of `num_parts`
// parts of the tokens of place.source. Calls `tell` once routes are known. Returns false if the
// call is given up.
template <class Experts, class Tell>
__device__ __forceinline__ bool count_for(
    const PlanLaunch& call,
    const PlanShared& shared,
    const Experts& experts,
    PlanPlace& place,
    uint32_t num_parts,
    uint32_t part_idx,
    const Tell& tell
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
  if (!read_all(call, place, shared, experts.chosen())) {
    return false;
  }
  place.num_tokens = shared.words[place.source].num_tokens;
  const PartSpan part = part_span(0, place.num_tokens, num_parts, part_idx);
  place.tokens = warp_tokens(part, place);
  place.short_expert = shared.experts_of(place.source);
  place.route_weight = shared.route_weight;
  place.stride = static_cast<uint32_t>(call.topk);
  experts.settle(place, shared);
  tell();
  count_all(call, place, shared, part);
  return true;
}

// Writes, by one warp, the routing of its tokens into the plan.
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

// Value that LocalState::grid counts to: one when the shape is written, one when the handshakes of
// all ranks are accepted.
inline constexpr uint32_t kRoutedPlanParts = 2;

// Waits, by one thread, for both parts. Returns false if the call is given up.
__device__ inline bool await_parts(const RankView& me, uint32_t epoch) {
  const WaitSite site = {Op::kPlan, epoch, me.rank, WaitFor::kGrid};
  return wait_reached(me, &me.local->grid, kRoutedPlanParts, site, 2);
}

// Writes this rank's routing to physical experts and says so, by all threads of a block.
__device__ inline void tell_routes(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared
) {
  keep_routing(call, place);
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::fence_gpu();
    ptx::store_relaxed_sys(&call.me.local->routed, *shared.call);
  }
}

// Waits, by one thread of another block, for tell_routes(). Returns false if the call is given up.
__device__ inline bool await_routes(const RankView& me) {
  const uint64_t number = current_call(me);
  const WaitSite site = {Op::kPlan, static_cast<uint32_t>(number), me.rank, WaitFor::kGrid};
  return wait_reached(me, &me.local->routed, number, site, 2);
}

// Writes the shape and this rank's routing, by all threads of a block. Returns false if the call is
// given up.
template <class Experts>
__device__ __forceinline__ bool plan_shape(
    const PlanLaunch& call, const PlanShared& shared, const Experts& experts, PlanPlace place
) {
  bool is_made = count_for(call, shared, experts, place, 1, 0, [&] {
    if constexpr (Experts::kIsBalanced) {
      experts.write_placement();
      tell_routes(call, place, shared);
    }
  });
  if (is_made) {
    const PlanGroup group = shape_group(call, place, shared, true);
    write_shape(call, group, place, shared, call.plan);
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::add_acq_rel_gpu(&call.me.local->grid, 1);
    }
    if constexpr (!Experts::kIsBalanced) {
      keep_routing(call, place);
    }
    if (threadIdx.x == 0) {
      is_made = await_parts(call.me, place.epoch);
    }
    is_made = __syncthreads_and(static_cast<int>(is_made)) != 0;
    if (is_made) {
      tell_host(call, group, place, shared);
    }
  }
  if (!is_made) {
    clear_plan(call.plan);
  }
  return is_made;
}

// Writes, by all threads of a block, the records of a part of place.source's tokens here, and what
// this rank keeps of its own tokens. Returns false if the call is given up.
template <class Experts>
__device__ __forceinline__ bool plan_records(
    const PlanLaunch& call,
    const PlanShared& shared,
    const Experts& experts,
    PlanPlace place,
    uint32_t part_idx
) {
  const RankView& me = call.me;
  place.writes_tokens = place.is_own(me);
  place.eager_slots = eager_slots_of(me, place.source);
  const auto num_parts = static_cast<uint32_t>(call.num_parts);
  if (!count_for(call, shared, experts, place, num_parts, part_idx, [] {})) {
    return false;
  }
  shape_group(call, place, shared, false);
  place_eager_rows(call, place, shared);
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::add_acq_rel_gpu(&me.local->placed, 1);
  }
  close_chunks(call, place, shared);
  write_eager_records(call, place, shared);
  __syncthreads();
  const uint32_t num_jobs = place.num_ranks * num_parts;
  if (threadIdx.x == 0 && ptx::add_acq_rel_gpu(&me.local->recorded, 1) == num_jobs - 1) {
    ptx::fence_gpu();
    for (int rank = 0; rank < me.num_ranks; ++rank) {
      ptx::store_relaxed_sys(records_of(me, me.rank, rank), *shared.call);
    }
  }
  return true;
}

// Waits, by one thread of another block, until the slots of eager rows are there and all ranks'
// handshakes are accepted. Returns false if the call is given up.
__device__ inline bool await_slots(const PlanLaunch& call, uint32_t epoch) {
  const RankView& me = call.me;
  const WaitSite site = {Op::kPlan, epoch, me.rank, WaitFor::kGrid};
  const auto num_jobs = static_cast<uint32_t>(me.num_ranks * call.num_parts);
  return wait_reached(me, &me.local->placed, num_jobs + 1, site, 2);
}

// Makes the plan, by all threads of the first call.num_blocks blocks, after send_routing(). Stops
// if the call is given up. The first block calls after_shape() once it has written or cleared the
// shape.
template <class Experts, class AfterShape>
__device__ __forceinline__ void make_routed_plan(
    const PlanLaunch& call,
    uint32_t epoch,
    const PlanShared& shared,
    const Experts& experts,
    const AfterShape& after_shape
) {
  PlanPlace place = plan_place(call, epoch);
  bool is_made = true;
  const int num_jobs = call.me.num_ranks * call.num_parts + 1;
#pragma unroll 1
  for (int job = static_cast<int>(blockIdx.x); job < num_jobs && is_made; job += call.num_blocks) {
    if (job == 0) {
      is_made = plan_shape(call, shared, experts, place);
      if (!is_made) {
        __syncthreads();  // it is cleared
      }
      after_shape();
    } else {
      const auto number = static_cast<uint32_t>(job - 1);
      const uint32_t part = call.plan.map.by_ranks.divide(number);
      place.source = call.plan.map.by_ranks.remainder(number, part);
      is_made = plan_records(call, shared, experts, place, part);
      place.source = static_cast<uint32_t>(call.me.rank);
    }
    __syncthreads();
  }
}

// Sends the handshake of the call, by one warp of the grid, with `word` in shared memory.
__device__ inline void post_plan_words(
    const PlanLaunch& call, uint32_t epoch, DeviceHandshake& word
) {
  const RankView& me = call.me;
  const int peer = lane_index();
  if (peer == 0) {
    write_word(call, word);
    word.status = own_status(me, epoch);
  }
  __syncwarp();
  if (peer < me.num_ranks) {
    post_word(me, epoch, word, peer);
  }
}

// Writes the handshake to `word` in a later launch of the call, as it was sent.
__device__ inline void recall_plan_word(
    const PlanLaunch& call, uint32_t epoch, DeviceHandshake& word
) {
  if (lane_index() == 0) {
    write_word(call, word);
    word.status = own_status(call.me, epoch);
    recall_status(call.me, epoch, word);
  }
  __syncwarp();
}

// Awaits all ranks' handshakes, as in every call, by one warp of the grid, with the own one in
// shared memory. Tells the planning blocks once they are accepted.
__device__ inline void accept_plan_words(
    const PlanLaunch& call, uint32_t epoch, const DeviceHandshake& word
) {
  const RankView& me = call.me;
  const int peer = lane_index();
  bool is_good = true;
  if (peer < me.num_ranks) {
    DeviceHandshake said;
    is_good = accept_word(me, epoch, word, peer, said);
  }
  if (__all_sync(kAllLanes, is_good) && peer == 0) {
    ptx::add_acq_rel_gpu(&me.local->grid, 1);
    ptx::add_acq_rel_gpu(&me.local->placed, 1);
  }
}

}  // namespace weft
