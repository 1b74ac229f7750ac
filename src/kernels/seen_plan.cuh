// SPDX-License-Identifier: Apache-2.0
// What the blocks that move rows learn of a plan that other blocks make at the same time.
#pragma once

#include "kernels/call_setup.cuh"
#include "kernels/plan_routed.cuh"

namespace weft {

// In shared memory: what a warp that moves nothing has seen, for those that move rows.
struct SeenPlan {
  enum : uint32_t { kNotYet, kHere, kGivenUp };
  uint32_t sizes;  // CallSetup::tokens holds
  uint32_t plan;   // this rank's plan is made, with the records of all ranks

  __device__ void clear() { sizes = plan = kNotYet; }
};

// One warp, all lanes.
__device__ __forceinline__ void tell_block(uint32_t& flag, bool is_here) {
  is_here = __all_sync(kAllLanes, is_here);
  if (lane_index() == 0) {
    __threadfence_block();
    atomicExch(&flag, is_here ? SeenPlan::kHere : SeenPlan::kGivenUp);
  }
}

// One warp, all lanes: false if the call is given up. It always comes to an end: whoever tells
// waits with a deadline.
__device__ __forceinline__ bool await_block(uint32_t& flag) {
  uint32_t seen = SeenPlan::kNotYet;
  if (lane_index() == 0) {
    while ((seen = atomicOr(&flag, 0U)) == SeenPlan::kNotYet) {
      __nanosleep(20);
    }
    __threadfence_block();
  }
  __syncwarp();
  return __shfl_sync(kAllLanes, seen, 0) == SeenPlan::kHere;
}

// One warp of a block, which moves nothing.
__device__ inline void watch_plan(const PlanLaunch& call, CallSetup& setup, SeenPlan& seen) {
  const RankView& me = call.me;
  const int rank = lane_index();
  bool is_good = true;
  if (rank < me.num_ranks) {
    const uint64_t* from = routing_of(me, me.rank, setup.epoch, rank) + RoutingMap::kNumTokens;
    const WaitSite site = {DeviceOp::kPlan, setup.epoch, rank, WaitFor::kRouting};
    uint32_t tokens = 0;
    is_good = wait_tagged(me, from, site, ptx::load_relaxed_sys(from), tokens) &&
              tokens <= me.map.max_tokens;
    setup.tokens[rank] = static_cast<int32_t>(tokens);
  }
  __syncwarp();
  tell_block(seen.sizes, is_good);
  if (is_good && rank == 0) {
    is_good = await_plan(call, setup.epoch);
  }
  __syncwarp();
  tell_block(seen.plan, is_good);
}

}  // namespace weft
