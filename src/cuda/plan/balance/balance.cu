// SPDX-License-Identifier: Apache-2.0
// The launches of launch.hpp. place.cuh, share_out.cuh and assign.cuh have the kernels.
#include <string>

#include "core/context.hpp"
#include "cuda/device/kernel.cuh"
#include "cuda/plan/balance/assign.cuh"
#include "cuda/plan/balance/launch.hpp"
#include "cuda/plan/balance/place.cuh"
#include "cuda/plan/balance/share_out.cuh"

namespace weft {
namespace {

bool is_wide(const PhysicalExperts& shape) {
  return shape.num_ranks > kWarpLanes;
}

Kernel<BalanceLaunch> place(const PhysicalExperts& shape) {
  return {
      is_wide(shape) ? place_kernel<2> : place_kernel<1>, kPlaceThreads, place_shared_bytes(shape)};
}

Kernel<BalanceLaunch> share_out(const PhysicalExperts& shape) {
  return {is_wide(shape) ? share_out_kernel<2> : share_out_kernel<1>, kShareThreads};
}

Kernel<AssignLaunch> count_routes(const PhysicalExperts& shape) {
  return {count_routes_kernel, kAssignThreads, count_shared_bytes(shape)};
}

Kernel<AssignLaunch> assign_routes(const PhysicalExperts& shape) {
  return {assign_routes_kernel, kAssignThreads, assign_shared_bytes(shape)};
}

// The kernel may get the most that any shape may need.
template <class Call>
void prepare_for(const Kernel<Call>& kernel, const PhysicalExperts& shape) {
  const int room = prepare_for_any_shared(kernel.function);
  if (kernel.shared_bytes > room) {
    raise_error(
        ErrorCode::kUnsupported,
        Context{},
        "balance: " + std::to_string(shape.num_experts) + " experts and " +
            std::to_string(shape.replicas) + " replicas on each of " +
            std::to_string(shape.num_ranks) + " ranks need " + std::to_string(kernel.shared_bytes) +
            " B of shared memory (this GPU has " + std::to_string(room) + " B)"
    );
  }
}

}  // namespace

void prepare_balance(const PhysicalExperts& shape) {
  if (shape.num_ranks > kMostBalancedRanks) {
    raise_error(
        ErrorCode::kUnsupported,
        Context{},
        "balance: " + std::to_string(shape.num_ranks) + " ranks (a GPU plans at most " +
            std::to_string(kMostBalancedRanks) + ")"
    );
  }
  prepare_for(place(shape), shape);
  prepare_for(share_out(shape), shape);
  prepare_for(count_routes(shape), shape);
  prepare_for(assign_routes(shape), shape);
}

void launch_count_routes(const AssignLaunch& call, cudaStream_t stream) {
  const size_t num_bytes = sizeof(int32_t) * static_cast<size_t>(call.shape.num_experts);
  WEFT_CUDA(Context{}, cudaMemsetAsync(call.counts, 0, num_bytes, stream));
  launch(count_routes(call.shape), kAssignBlocks, call, stream);
}

void launch_plan_balance(const BalanceLaunch& call, cudaStream_t stream) {
  launch(place(call.shape), 1, call, stream);
  launch(share_out(call.shape), share_blocks(call.shape), call, stream);
}

void launch_assign_routes(const AssignLaunch& call, cudaStream_t stream) {
  launch(assign_routes(call.shape), kAssignBlocks, call, stream);
}

}  // namespace weft
