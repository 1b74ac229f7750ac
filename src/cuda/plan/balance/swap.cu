// SPDX-License-Identifier: Apache-2.0
// Gathers all ranks' counts before balancing: what the plan kernel begins with, as the first half
// of a call whose second is the plan of physical experts. Both halves have that call's number.
// Before: the router; after: launch_plan_balance.
#include "cuda/device/kernel.cuh"
#include "cuda/plan/balance/launch.hpp"
#include "cuda/plan/shared.cuh"
#include "cuda/plan/swap_counts.cuh"

namespace weft {
namespace {

extern __shared__ uint4 swap_shared_memory[];

struct SwapLaunch {
  PlanLaunch plan;
  int32_t* counts = nullptr;
};

// Writes, by one block, the counts that accept_words() has waited for, by source.
__device__ inline void write_counts(
    const SwapLaunch& call, const PlanPlace& place, const PlanShared& shared, bool is_good
) {
  const RankView& me = call.plan.me;
  const uint32_t num_experts = place.columns - place.num_ranks;
  for (uint32_t source = 0; source < place.num_ranks; ++source) {
    const auto* theirs = reinterpret_cast<const int32_t*>(
        shared.control[me.rank] + me.map.word_offset(place.epoch, source) + sizeof(DeviceHandshake)
    );
    for (uint32_t expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
      const uint32_t column = place.num_ranks + expert;
      const int32_t count = !is_good || place.is_lost(source) ? 0
                            : place.source == source          ? shared.own()[column]
                                                              : __ldcg(theirs + column);
      call.counts[source * num_experts + expert] = count;
    }
  }
}

// Ends the kernel, called by every thread of every block: as finish_call(), but the call goes on
// unless all ranks give it up. A call that a rank gives up alone goes on, so that its handshakes
// tell the others.
__device__ inline void finish_half(const RankView& me) {
  __syncthreads();
  if (threadIdx.x == 0 && ptx::add_acq_rel_gpu(&me.local->done, 1) == gridDim.x - 1) {
    me.local->done = 0;
    me.local->grid = 0;
    me.local->goes_on = stop_state(me) == StopState::kGivenUp ? 0 : 1;
  }
}

__global__ void __launch_bounds__(kMaxPlanThreads)
    swap_counts_kernel(const __grid_constant__ SwapLaunch call) {
  __shared__ SmallPlanShared small;
  const PlanMap& map = call.plan.plan.map;
  const PlanShared shared = carve(
      {map.num_ranks, map.num_experts}, reinterpret_cast<std::byte*>(swap_shared_memory), small
  );
  const auto epoch = static_cast<uint32_t>(current_call(call.plan.me));
  PlanPlace place = plan_place(call.plan, epoch);
  place.tokens = own_tokens(call.plan, place);
  const bool is_good = swap_counts(call.plan, place, shared);
  if (blockIdx.x == 0) {
    write_counts(call, place, shared, is_good);
  }
  finish_half(call.plan.me);
}

}  // namespace

void prepare_swap_counts() {
  prepare_for_any_shared(swap_counts_kernel);
}

void launch_swap_counts(const PlanLaunch& plan, int32_t* counts, cudaStream_t stream) {
  const PlanSharedMap shared = {plan.plan.map.num_ranks, plan.plan.map.num_experts};
  const Kernel<SwapLaunch> kernel = {
      swap_counts_kernel,
      static_cast<int>(shared.num_threads()),
      static_cast<int>(shared.num_bytes())};
  launch(
      kernel, plan.num_blocks, {plan, counts}, stream, {plan.me.rank, plan.me.num_ranks, "cuda"}
  );
}

}  // namespace weft
