// SPDX-License-Identifier: Apache-2.0
// The launches of launch.hpp. place.cuh, spread.cuh, share_out.cuh and assign.cuh have the kernels.
#include <algorithm>
#include <string>

#include "core/context.hpp"
#include "cuda/device/kernel.cuh"
#include "cuda/plan/balance/assign.cuh"
#include "cuda/plan/balance/launch.hpp"
#include "cuda/plan/balance/place.cuh"
#include "cuda/plan/balance/share_out.cuh"
#include "cuda/plan/balance/spread.cuh"

namespace weft {
namespace {

bool is_wide(const PhysicalExperts& shape) {
  return shape.num_ranks > kWarpLanes;
}

Kernel<BalanceLaunch> place(const PhysicalExperts& shape) {
  return {
      is_wide(shape) ? place_kernel<2> : place_kernel<1>, kPlaceThreads, place_shared_bytes(shape)};
}

Kernel<SpreadLaunch> spread(const PhysicalExperts& shape) {
  return {spread_kernel, kPlaceThreads, spread_shared_bytes(shape)};
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

template <class Call>
void check_room(const Kernel<Call>& kernel, const PhysicalExperts& shape, const Context& context) {
  const int room = prepare_for_any_shared(kernel.function);
  if (kernel.shared_bytes > room) {
    raise_error(
        ErrorCode::kUnsupported,
        context,
        "balance: " + std::to_string(shape.num_experts) + " experts and " +
            std::to_string(shape.replicas) + " replicas on each of " +
            std::to_string(shape.num_ranks) + " ranks need " + std::to_string(kernel.shared_bytes) +
            " B of shared memory (this GPU has " + std::to_string(room) + " B)"
    );
  }
}

}  // namespace

void prepare_balance() {
  for (const int num_ranks : {1, kMostBalancedRanks}) {
    const PhysicalExperts any = {num_ranks, num_ranks, 0};
    prepare_for_any_shared(place(any).function);
    prepare_for_any_shared(share_out(any).function);
  }
  prepare_for_any_shared(spread_kernel);
  prepare_for_any_shared(count_routes_kernel);
  prepare_for_any_shared(assign_routes_kernel);
}

void check_balance(const PhysicalExperts& shape, const Context& context) {
  if (shape.num_ranks > kMostBalancedRanks) {
    raise_error(
        ErrorCode::kUnsupported,
        context,
        "balance: " + std::to_string(shape.num_ranks) + " ranks (a GPU plans at most " +
            std::to_string(kMostBalancedRanks) + ")"
    );
  }
  check_room(place(shape), shape, context);
  check_room(spread(shape), shape, context);
  check_room(share_out(shape), shape, context);
  check_room(count_routes(shape), shape, context);
  check_room(assign_routes(shape), shape, context);
}

void launch_count_routes(const AssignLaunch& call, cudaStream_t stream) {
  const size_t num_bytes = sizeof(int32_t) * static_cast<size_t>(call.shape.num_experts);
  WEFT_CUDA(Context{}, cudaMemsetAsync(call.counts, 0, num_bytes, stream));
  launch(count_routes(call.shape), kAssignBlocks, call, stream);
}

void launch_plan_balance(
    const BalanceLaunch& call, std::span<const int32_t> placement, cudaStream_t stream
) {
  if (placement.empty()) {
    launch(place(call.shape), 1, call, stream);
  } else {
    SpreadLaunch given = {.balance = call};
    std::ranges::copy(placement, std::begin(given.placement));
    launch(spread(call.shape), 1, given, stream);
  }
  launch(share_out(call.shape), share_blocks(call.shape), call, stream);
}

void launch_assign_routes(const AssignLaunch& call, cudaStream_t stream) {
  launch(assign_routes(call.shape), kAssignBlocks, call, stream);
}

}  // namespace weft
