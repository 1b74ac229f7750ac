// SPDX-License-Identifier: Apache-2.0
// The kernel of plan: one launch (plan_make.cuh). Previous in the data flow:
// exchange/plan_call_cuda.cpp.
#include <string>

#include "core/check_cuda.hpp"
#include "core/context.hpp"
#include "kernels/plan_make.cuh"

namespace weft {
namespace {

extern __shared__ uint4 plan_shared_memory[];

__global__ void __launch_bounds__(kMaxPlanThreads, 2)
    plan_kernel(const __grid_constant__ PlanLaunch call) {
  __shared__ SmallPlanShared small;
  const PlanMap& map = call.plan.map;
  const PlanShared shared = carve(
      {map.num_ranks, map.num_experts}, reinterpret_cast<std::byte*>(plan_shared_memory), small
  );
  const uint32_t epoch = current_epoch(call.me);
  make_plan(call, epoch, shared);
  finish_call(call.me, epoch);
}

Context context_of(const RankView& me) {
  return {me.rank, me.num_ranks, "cuda"};
}

}  // namespace

uint64_t plan_scratch_bytes(const PlanMap& map) {
  return sizeof(int32_t) * uint64_t{kMaxPlanBlocks} * (map.num_ranks + map.num_experts);
}

void prepare_plan(const PlanMap& map) {
  const Context nobody;
  const PlanSharedMap shared = {map.num_ranks, map.num_experts};
  int device = 0;
  int most = 0;
  cudaFuncAttributes attributes = {};
  WEFT_CUDA(nobody, cudaGetDevice(&device));
  WEFT_CUDA(nobody, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  WEFT_CUDA(nobody, cudaFuncGetAttributes(&attributes, plan_kernel));
  const uint64_t room = static_cast<uint64_t>(most) - attributes.sharedSizeBytes;
  if (shared.num_bytes() > room) {
    raise_error(
        ErrorCode::kUnsupported,
        nobody,
        "plan: " + std::to_string(map.num_experts) + " experts on " +
            std::to_string(map.num_ranks) + " ranks need " + std::to_string(shared.num_bytes()) +
            " B of shared memory (this GPU has " + std::to_string(room) + " B)"
    );
  }
  // For every exchange of this device, so the most that any may need.
  WEFT_CUDA(
      nobody,
      cudaFuncSetAttribute(
          plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room)
      )
  );
}

void launch_plan(const PlanLaunch& call, cudaStream_t stream) {
  const Context context = context_of(call.me);
  const PlanSharedMap shared = {call.plan.map.num_ranks, call.plan.map.num_experts};
  plan_kernel<<<
      static_cast<unsigned>(call.num_blocks),
      shared.num_threads(),
      shared.num_bytes(),
      stream>>>(call);
  WEFT_CUDA(context, cudaGetLastError());
}

}  // namespace weft
