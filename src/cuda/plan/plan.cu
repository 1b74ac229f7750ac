// SPDX-License-Identifier: Apache-2.0
// The kernel of plan, one launch: it turns a router's indices or map into a plan block
// (layout/plan.hpp) on every rank. Before: plan/call.cpp, which launches it. After: the kernels of
// dispatch/ and combine/, and plan/download.cpp.
//
// The parts of the kernel are in read_routing.cuh, swap_counts.cuh, group.cuh and place_routes.cuh,
// in this order; shared.cuh has what its threads share.
#include <string>

#include "core/context.hpp"
#include "cuda/device/kernel.cuh"
#include "cuda/plan/group.cuh"
#include "cuda/plan/place_routes.cuh"
#include "cuda/plan/read_routing.cuh"
#include "cuda/plan/shared.cuh"
#include "cuda/plan/swap_counts.cuh"

namespace weft {

// Makes the whole plan of one rank, by the first blocks of a grid:
//
//   read routing, count -> [blocks meet] -> counts to all ranks -> counts of all ranks -> shape
//   -> slots, records to their receivers -> [last block] records are there
//
// Each block adds up the counts of the whole rank and computes the shape of the whole group by
// itself: that costs less than if the blocks met once more.

// Called by all threads. The last block that has written its records tells all receivers.
__device__ inline void raise_records(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared
) {
  __syncthreads();
  if (threadIdx.x != 0) {
    return;
  }
  ptx::fence_sys();
  if (place.num_blocks > 1) {  // the counter goes on from where the blocks met
    if (ptx::add_acq_rel_gpu(&call.me.local->grid, 1) != 2 * place.num_blocks - 1) {
      return;
    }
    ptx::fence_sys();
  }
  tell_records(call.me, *shared.call);
}

// Makes the plan, by all threads of all blocks. If the call is given up, a block's threads return
// together.
__device__ inline void make_plan(const PlanLaunch& call, uint32_t epoch, const PlanShared& shared) {
  PlanPlace place = plan_place(call, epoch);
  place.tokens = own_tokens(call, place);
  const bool is_over = call.is_second && call.me.local->goes_on == 0;
  if (is_over || !swap_counts(call, place, shared)) {
    if (blockIdx.x == 0) {
      clear_plan(call.plan);
    }
    return;
  }
  const PlanGroup group = shape_group(call, place, shared);
  if (blockIdx.x == 0) {
    tell_host(call, group, place, shared);
    write_shape(call, group, place, shared, call.plan);
    close_chunks(call, place, shared);
  }
  place_tokens(call, place, shared);
  raise_records(call, place, shared);
}
namespace {

extern __shared__ uint4 plan_shared_memory[];

__global__ void __launch_bounds__(kMaxPlanThreads, 2)
    plan_kernel(const __grid_constant__ PlanLaunch call) {
  __shared__ SmallPlanShared small;
  const PlanMap& map = call.plan.map;
  const PlanShared shared = carve(
      {map.num_ranks, map.num_experts}, reinterpret_cast<std::byte*>(plan_shared_memory), small
  );
  const uint64_t number = current_call(call.me);
  const auto epoch = static_cast<uint32_t>(number);
  if (threadIdx.x == 0) {
    small.call = number;
  }
  make_plan(call, epoch, shared);
  finish_call(call.me, epoch);
}

// Waits, with a deadline, until a plan's arrival records have come from all sources. The wait is no
// call of its own, so it counts no epoch.
__global__ void wait_records(
    const __grid_constant__ RankView me, const __grid_constant__ PlanView plan
) {
  const int source = static_cast<int>(threadIdx.x);
  const uint64_t epoch = plan.header()->epoch;
  bool has_come = true;
  if (source < me.num_ranks) {
    const WaitSite site = {Op::kPlan, static_cast<uint32_t>(epoch), source, WaitFor::kRecords};
    has_come = wait_reached(me, records_of(me, me.rank, source), epoch, site);
  }
  const int have_all = __syncthreads_and(static_cast<int>(has_come));
  if (threadIdx.x == 0) {
    *plan.has_records() = have_all != 0 ? 1 : 2;
  }
}

}  // namespace

uint64_t plan_scratch_bytes(const PlanMap& map) {
  return sizeof(int32_t) * uint64_t{kMaxPlanBlocks} * (map.num_ranks + map.num_experts);
}

// Serves every exchange of this device, so the kernel may get the most that any may need.
void prepare_plan(const PlanMap& map) {
  load(wait_records);
  const PlanSharedMap shared = {map.num_ranks, map.num_experts};
  const auto room = static_cast<uint64_t>(prepare_for_any_shared(plan_kernel));
  if (shared.num_bytes() > room) {
    raise_error(
        ErrorCode::kUnsupported,
        Context{},
        "plan: " + std::to_string(map.num_experts) + " experts on " +
            std::to_string(map.num_ranks) + " ranks need " + std::to_string(shared.num_bytes()) +
            " B of shared memory (this GPU has " + std::to_string(room) + " B)"
    );
  }
}

void launch_wait_records(const RankView& me, const PlanView& plan, cudaStream_t stream) {
  wait_records<<<1, kMaxDomainRanks, 0, stream>>>(me, plan);
  WEFT_CUDA((Context{me.rank, me.num_ranks, "cuda"}), cudaGetLastError());
}

void launch_plan(const PlanLaunch& call, cudaStream_t stream) {
  const PlanSharedMap shared = {call.plan.map.num_ranks, call.plan.map.num_experts};
  const Kernel<PlanLaunch> kernel = {
      plan_kernel, static_cast<int>(shared.num_threads()), static_cast<int>(shared.num_bytes())};
  launch(kernel, call.num_blocks, call, stream, {call.me.rank, call.me.num_ranks, "cuda"});
}

}  // namespace weft
