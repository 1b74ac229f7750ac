// SPDX-License-Identifier: Apache-2.0
// A kernel that waits, with a deadline, until a plan's arrival records have come from all sources.
// plan/download.cpp launches it before it copies a plan to the host.
#include "cuda/device/kernel.cuh"
#include "cuda/device/wait.cuh"
#include "cuda/plan/download.hpp"

namespace weft {
namespace {

// It is no call of its own, so it counts no epoch.
__global__ void wait_records(
    const __grid_constant__ RankView me, const __grid_constant__ PlanView plan
) {
  const int source = static_cast<int>(threadIdx.x);
  const uint32_t epoch = plan.header()->epoch;
  bool has_come = true;
  if (source < me.num_ranks) {
    const WaitSite site = {Op::kPlan, epoch, source, WaitFor::kRecords};
    const uint32_t slot = me.map.signals().records(static_cast<uint32_t>(source));
    has_come = wait_reached(me, signal_of(me, me.rank, slot), epoch, site);
  }
  const int have_all = __syncthreads_and(static_cast<int>(has_come));
  if (threadIdx.x == 0) {
    *plan.has_records() = have_all != 0 ? 1 : 2;
  }
}

}  // namespace

void prepare_wait_records() {
  load(wait_records);
}

void launch_wait_records(const RankView& me, const PlanView& plan, cudaStream_t stream) {
  wait_records<<<1, kMaxDomainRanks, 0, stream>>>(me, plan);
  WEFT_CUDA((Context{me.rank, me.num_ranks, "cuda"}), cudaGetLastError());
}

}  // namespace weft
