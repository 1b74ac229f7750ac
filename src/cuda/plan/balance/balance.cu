// SPDX-License-Identifier: Apache-2.0
// The launches of launch.hpp and their kernels, which call the functions of place.cuh, spread.cuh,
// share_out.cuh and assign.cuh. fused.cuh calls the same functions in a larger launch.
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

extern __shared__ int32_t balance_shared[];

template <int kPerLane>
__global__ void __launch_bounds__(kPlaceThreads)
    place_kernel(const __grid_constant__ BalanceLaunch call) {
  __shared__ int32_t loads[kMostBalancedRanks];
  __shared__ int32_t outcome[kPlaceWarps];
  __shared__ int32_t moved[2 * kMostBalancedRanks];
  sum_sources(call, balance_shared);
  const uint32_t lost = load_lost(call.lost);
  place_replicas<kPerLane>(call, lost, {balance_shared, loads, outcome, moved});
}

__global__ void __launch_bounds__(kPlaceThreads)
    spread_kernel(const __grid_constant__ SpreadLaunch call) {
  __shared__ int32_t loads[kMaxDomainRanks];
  const PhysicalExperts& shape = call.balance.shape;
  const SpreadShared shared = spread_shared(shape, balance_shared);
  sum_sources(call.balance, shared.rows);
  spread_rows(call.balance, load_lost(call.balance.lost), shared, loads, call.placement);
  for (int i = static_cast<int>(threadIdx.x); i < shape.count(); i += kPlaceThreads) {
    call.balance.rows[i] = shared.here[i];
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(kShareThreads)
    share_out_kernel(const __grid_constant__ BalanceLaunch call) {
  const int warp = static_cast<int>(blockIdx.x) * kShareWarps + warp_in_block();
  if (warp < call.shape.num_experts) {
    share_expert<kPerLane>(call, warp);
  } else if (warp < call.shape.count()) {
    clear_empty(call, warp - call.shape.num_experts);
  }
}

__global__ void __launch_bounds__(kAssignThreads)
    count_routes_kernel(const __grid_constant__ AssignLaunch call) {
  const int num_experts = call.shape.num_experts;
  const auto thread = static_cast<int>(threadIdx.x);
  clear_counts(balance_shared, num_experts);
  __syncthreads();
  count_span(call, routes_of_block(call), thread, kAssignThreads, balance_shared);
  __syncthreads();
  int32_t* const of_block = call.block_counts + static_cast<size_t>(blockIdx.x) * num_experts;
  for (int expert = thread; expert < num_experts; expert += kAssignThreads) {
    const int32_t count = balance_shared[expert];
    of_block[expert] = count;
    if (count != 0) {
      atomicAdd(call.counts + expert, count);
    }
  }
}

__global__ void __launch_bounds__(kAssignThreads)
    assign_routes_kernel(const __grid_constant__ AssignLaunch call) {
  const AssignShared shared = load_places(call, balance_shared);
  const int warp = warp_in_block();
  const int lane = lane_index();
  const PartSpan block = routes_of_block(call);
  const PartSpan routes =
      part_span(block.first, block.last, kAssignWarps, static_cast<uint32_t>(warp));
  int32_t* const counts = shared.counts + warp * call.shape.num_experts;
  count_span(call, routes, lane, kWarpLanes, counts);
  __syncthreads();
  sum_up(call, shared);
  for (int32_t first = routes.first; first < routes.last; first += kWarpLanes) {
    const int32_t route = first + lane;
    const bool is_mine = route < routes.last;
    const int32_t expert = is_mine ? expert_of(call, route) : -1;
    const int32_t place = assign_step(call.shape, shared, counts, expert);
    if (is_mine) {
      call.physical[route] = place;
    }
  }
}

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
