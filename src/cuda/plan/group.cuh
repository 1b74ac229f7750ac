// SPDX-License-Identifier: Apache-2.0
// Third part of the plan kernel: computes, from all ranks' counts, every expert's block of rows,
// where this thread block's routes lie in it, and the shape of this rank's output.
// plan/group_shape.cpp does the same on the host. Before: swap_counts.cuh; after: place_routes.cuh.
#pragma once

#include "cuda/device/wait.cuh"
#include "cuda/plan/shared.cuh"
#include "plan/slots.hpp"

namespace weft {

// Properties of the group's outputs that every thread has; the rest is in shared memory.
struct PlanGroup {
  Layout layout = Layout::kExpertMajor;
  BlockRule rule;       // stride resolved
  int64_t largest = 0;  // padded expert of the group; kExpertStrided only
  uint32_t per_rank = 1;
  bool overflow = false;  // some route to or from this rank is dropped
};

struct GroupBlock {
  int64_t begin = 0;
  int64_t limit = 0;
};

__device__ __forceinline__ int64_t padded_rows(const BlockRule& rule, int64_t rows) {
  return rule.pad_multiple == 1 ? rows : padded_count(rows, rule.pad_multiple);  // spares a divide
}

// Returns the rows that the experts of `rank` need in this layout.
__device__ __forceinline__ int64_t
needed_rows(const PlanGroup& group, const PlanShared& shared, uint32_t rank) {
  switch (group.layout) {
    case Layout::kRankMajor:
      return shared.total[rank];
    case Layout::kExpertStrided:
      return group.rule.stride * group.per_rank;
    default:
      const int64_t* begin = shared.begin + rank * group.per_rank;
      return begin[group.per_rank] - begin[0];
  }
}

// Returns the rows of the output of `rank`: its budget, or what it needs.
__device__ __forceinline__ int64_t
output_rows(const PlanGroup& group, const PlanShared& shared, uint32_t rank) {
  const int64_t budget = shared.words[rank].number;
  return budget < 0 ? needed_rows(group, shared, rank) : budget;
}

// Returns the rows of an expert in its owner's output, in every layout except kRankMajor.
__device__ __forceinline__ GroupBlock
expert_block(const PlanGroup& group, const PlanShared& shared, uint32_t expert, uint32_t owner) {
  const uint32_t first = owner * group.per_rank;
  const int64_t begin = group.rule.strided ? group.rule.stride * (expert - first)
                                           : shared.begin[expert] - shared.begin[first];
  return {begin, block_limit(group.rule, begin, output_rows(group, shared, owner))};
}

// Returns, to each lane, the sum of the values of all warps before its own.
__device__ __forceinline__ int64_t sum_before(const int64_t* of_warps, const PlanPlace& place) {
  int64_t sum = place.lane < place.warp ? of_warps[place.lane] : 0;
#pragma unroll
  for (uint32_t distance = kMaxPlanThreads / kPlanLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  return __shfl_sync(kAllLanes, sum, 0);
}

// Turns, by all threads, begin[0, count] into the sums of the values before each.
__device__ inline void scan_begins(
    int64_t* begin, uint32_t count, const PlanPlace& place, int64_t* partial
) {
  const auto shift = static_cast<uint32_t>(31 - __clz(static_cast<int>(blockDim.x)));
  const uint32_t each = (count + blockDim.x - 1) >> shift;  // blockDim.x is a power of two
  const uint32_t first = threadIdx.x * each;
  const uint32_t last = min(first + each, count);
  int64_t sum = 0;
  for (uint32_t i = first; i < last; ++i) {
    sum += begin[i];
  }
  int64_t up_to = sum;
#pragma unroll
  for (uint32_t distance = 1; distance < kPlanLanes; distance *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, up_to, distance);
    up_to += place.lane >= distance ? other : 0;
  }
  if (place.lane == kPlanLanes - 1) {
    partial[place.warp] = up_to;
  }
  __syncthreads();
  int64_t next = up_to - sum + sum_before(partial, place);
  for (uint32_t i = first; i < last; ++i) {
    const int64_t rows = begin[i];
    begin[i] = next;
    next += rows;
  }
  if (threadIdx.x == blockDim.x - 1) {  // what lies past the last value adds nothing
    begin[count] = next;
  }
  __syncthreads();
}

__device__ __forceinline__ int64_t warp_largest(int64_t value) {
#pragma unroll
  for (uint32_t distance = kPlanLanes / 2; distance > 0; distance /= 2) {
    const int64_t other = __shfl_xor_sync(kAllLanes, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

// Returns, to all threads, the largest of their values.
__device__ inline int64_t largest_of(int64_t value, const PlanPlace& place, int64_t* partial) {
  value = warp_largest(value);
  if (place.lane == 0) {
    partial[place.warp] = value;
  }
  __syncthreads();
  return warp_largest(place.lane < place.num_warps ? partial[place.lane] : value);
}

// Fills `runs`, by all threads, and returns whether routes to or from this rank lack room.
__device__ inline bool find_runs(
    const PlanLaunch& call, const PlanGroup& group, const PlanPlace& place, const PlanShared& shared
) {
  const auto me = static_cast<uint32_t>(call.me.rank);
  bool lacks_room = false;
  for (uint32_t column = threadIdx.x; column < place.columns; column += blockDim.x) {
    const bool is_arrivals = column < place.num_ranks;
    if (is_arrivals != (group.layout == Layout::kRankMajor)) {
      continue;
    }
    GroupBlock block;
    uint32_t owner = column;
    uint32_t before = 0;
    if (is_arrivals) {
      block.limit = output_rows(group, shared, owner);  // places count the earlier blocks already
    } else {
      const uint32_t expert = column - place.num_ranks;
      owner = place.experts_per_rank.divide(expert);
      block = expert_block(group, shared, expert, owner);
      before = shared.before[column];
    }
    block.limit = min(block.limit, int64_t{INT32_MAX});  // slots have 32 bits
    const int64_t first = block.begin + shared.earlier[column];
    const int64_t own = shared.own()[column];
    lacks_room |= own > 0 && first + own > block.limit;
    const int64_t rows = shared.total[column];
    lacks_room |= owner == me && rows_within(block.begin, rows, block.limit) < rows;
    shared.runs[column] = {slot_number(first + before), slot_number(block.limit)};
  }
  return __syncthreads_or(static_cast<int>(lacks_room)) != 0;
}

// Computes, by all threads, everything that follows from the counts. `wants_largest`: finds
// PlanGroup::largest although the caller has given a stride.
__device__ inline PlanGroup shape_group(
    const PlanLaunch& call,
    const PlanPlace& place,
    const PlanShared& shared,
    bool wants_largest = true
) {
  const uint32_t num_experts = call.plan.map.num_experts;
  PlanGroup group;
  group.layout = call.layout;
  group.rule = {call.layout == Layout::kExpertStrided, call.pad_multiple, call.expert_stride};
  group.per_rank = place.experts_per_rank.divisor();
  const int64_t* rows = shared.total + place.num_ranks;
  if (call.layout == Layout::kExpertMajor) {
    for (uint32_t expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
      shared.begin[expert] = padded_rows(group.rule, rows[expert]);
    }
    __syncthreads();
    scan_begins(shared.begin, num_experts, place, shared.partial);
  } else if (call.layout == Layout::kExpertStrided && (wants_largest || call.expert_stride == 0)) {
    int64_t most = 0;
    for (uint32_t expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
      const int64_t padded = padded_rows(group.rule, rows[expert]);
      most = padded > most ? padded : most;
    }
    group.largest = largest_of(most, place, shared.partial);
    group.rule.stride = call.expert_stride == 0 ? group.largest : call.expert_stride;
  }
  group.overflow = find_runs(call, group, place, shared);
  return group;
}

// Writes the shape, by all threads of one block, into a plan block or its copy in host memory.
__device__ inline void write_shape(
    const PlanLaunch& call,
    const PlanGroup& group,
    const PlanPlace& place,
    const PlanShared& shared,
    const PlanView& to
) {
  const auto me = static_cast<uint32_t>(call.me.rank);
  const int64_t num_rows = output_rows(group, shared, me);
  const int64_t* all_rows = shared.total + place.num_ranks;
  if (threadIdx.x == blockDim.x - 1) {  // not the one that fences
    PlanHeader header;
    header.epoch = *shared.call;
    header.members = call.me.local->members;
    header.serial = call.plan.serial;
    header.num_tokens = call.num_tokens;
    header.overflow = group.overflow ? 1 : 0;
    header.num_rows = num_rows;
    header.required_rows =
        group.rule.strided ? group.largest * group.per_rank : needed_rows(group, shared, me);
    header.expert_stride = group.rule.stride;
    for (uint32_t rank = 0; rank < place.num_ranks && !group.rule.strided; ++rank) {
      const int64_t rows = output_rows(group, shared, rank);
      const int64_t needs = needed_rows(group, shared, rank);
      if (needs > rows) {
        header.short_rank = static_cast<int32_t>(rank);
        header.short_rows = rows;
        header.short_needs = needs;
        break;
      }
    }
    *to.header() = header;
  }
  for (uint32_t expert = threadIdx.x; expert < call.plan.map.num_experts; expert += blockDim.x) {
    to.global_routes()[expert] = all_rows[expert];
  }
  if (call.is_second) {  // what few plans have is not fetched by all
    const uint32_t num_places = place.num_ranks * call.plan.map.replicas;
    for (uint32_t i = threadIdx.x; i < num_places; i += blockDim.x) {  // there before the plan
      to.placement()[i] = call.plan.placement()[i];
    }
  }
  for (uint32_t local = threadIdx.x; local < group.per_rank; local += blockDim.x) {
    const uint32_t expert = me * group.per_rank + local;
    const int64_t wanted = all_rows[expert];
    int64_t begin = 0;
    int64_t rows = wanted;
    int64_t padded = wanted;
    if (group.layout != Layout::kRankMajor) {
      const GroupBlock block = expert_block(group, shared, expert, me);
      begin = at_most(block.begin, num_rows);
      rows = rows_within(begin, wanted, block.limit);
      padded = rows_within(begin, padded_rows(group.rule, wanted), block.limit);
    }
    to.expert_begin()[local] = begin;
    to.rows_per_expert()[local] = rows;
    to.padded_rows_per_expert()[local] = padded;
  }
  if (threadIdx.x < place.num_ranks) {
    const uint32_t rank = threadIdx.x;
    int32_t received_base = 0;
    for (uint32_t source = 0; source < rank; ++source) {
      received_base += shared.received[source];
    }
    to.tokens_of()[rank] = shared.words[rank].num_tokens;
    to.sent()[rank] = shared.own()[rank];
    to.received()[rank] = shared.received[rank];
    to.arrival_base()[rank] = static_cast<int32_t>(shared.earlier[rank]);
    to.received_base()[rank] = received_base;
  }
}

// Writes this rank's shape to the host, if asked for, by all threads of one block.
__device__ inline void tell_host(
    const PlanLaunch& call, const PlanGroup& group, const PlanPlace& place, const PlanShared& shared
) {
  if (call.host_shape != nullptr) {
    write_shape(call, group, place, shared, {call.host_shape, call.plan.map});
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::fence_sys();
      ptx::store_relaxed_sys(
          reinterpret_cast<uint32_t*>(call.host_shape + call.plan.map.shape_bytes()), 1U
      );
    }
  }
}

// Clears, by all threads of one block, what a later call would follow in a given-up plan.
__device__ inline void clear_plan(const PlanView& plan) {
  if (threadIdx.x == 0) {
    *plan.header() = PlanHeader{};
  }
  for (uint32_t rank = threadIdx.x; rank < plan.map.num_ranks; rank += blockDim.x) {
    plan.tokens_of()[rank] = 0;
  }
  const uint32_t num_local_experts = plan.map.num_experts / plan.map.num_ranks;
  for (uint32_t expert = threadIdx.x; expert < num_local_experts; expert += blockDim.x) {
    plan.rows_per_expert()[expert] = 0;
    plan.padded_rows_per_expert()[expert] = 0;
    plan.expert_begin()[expert] = 0;
  }
}

}  // namespace weft
