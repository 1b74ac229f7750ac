// SPDX-License-Identifier: Apache-2.0
// What a kernel that makes a plan leaves in it beside the records.
#pragma once

#include "kernels/plan_group.cuh"
#include "kernels/wait.cuh"

namespace weft {

// All threads of one block: this rank's shape into its plan and, if asked for, to the host.
__device__ inline void publish_shape(
    const PlanLaunch& call, const PlanGroup& group, const PlanPlace& place, const PlanShared& shared
) {
  if (call.host_shape != nullptr) {
    write_shape(call, group, place, shared, {call.host_shape, call.plan.map});
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::fence_sys();
      ptx::store_relaxed_sys(
          reinterpret_cast<uint32_t*>(call.host_shape + call.plan.map.shape_bytes()), place.epoch
      );
    }
  }
  write_shape(call, group, place, shared, call.plan);
}

// All threads of one block: a plan that was given up leaves nothing that a later call would follow.
__device__ inline void clear_plan(const PlanLaunch& call) {
  const PlanMap& map = call.plan.map;
  if (threadIdx.x == 0) {
    *call.plan.header() = PlanHeader{};
  }
  for (uint32_t rank = threadIdx.x; rank < map.num_ranks; rank += blockDim.x) {
    call.plan.tokens_of()[rank] = 0;
  }
  for (uint32_t expert = threadIdx.x; expert < map.num_experts / map.num_ranks;
       expert += blockDim.x) {
    call.plan.rows_per_expert()[expert] = 0;
    call.plan.padded_rows_per_expert()[expert] = 0;
    call.plan.expert_begin()[expert] = 0;
  }
}

}  // namespace weft
