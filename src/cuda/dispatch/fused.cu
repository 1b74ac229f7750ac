// SPDX-License-Identifier: Apache-2.0
// A plan and the dispatch by it in one launch, for calls of few tokens, whose latency decides: the
// first blocks make the plan (plan_routed.cuh) while the others push rows to where no plan has to
// say (dispatch_push.cuh) and then fan them out (dispatch_early.cuh). Previous in the data flow:
// exchange/dispatch_routed_call_cuda.cpp.
#include <algorithm>

#include "core/gpu/check.hpp"
#include "cuda/dispatch/eager.cuh"
#include "cuda/dispatch/push.cuh"
#include "cuda/plan/fused.cuh"

namespace weft {
namespace {

static_assert(
    sizeof(SmallPlanShared) + sizeof(CallSetup) + sizeof(TeamProgress) + sizeof(SeenPlan) +
        sizeof(uint64_t) * kMoverWarps * kBulkStages <=
    kMostStaticShared
);
static_assert(kRoutedThreads >= kRoleThreads + 2 * kWarpLanes && kRoutedThreads <= kMaxPlanThreads);

// Of a block that moves rows, behind the warp that signals.
constexpr int kWatchWarp = kMoverWarps + 1;
constexpr int kWordWarp = kMoverWarps + 2;  // of one block alone

using Push = DispatchPush<EarlyRoutes>;

// All threads of a block: places that depend on nothing that peers would have to say.
__device__ void set_places(CallSetup& setup, SeenPlan& seen, const RankView& me, uint32_t epoch) {
  if (threadIdx.x == 0) {
    seen.clear();
    setup.epoch = epoch;
  }
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < me.num_ranks) {
    const DeviceControlMap& map = me.map;
    std::byte* control = control_of(me, peer);
    const int64_t first = static_cast<int64_t>(me.rank) * map.max_tokens;
    setup.rows[peer] = control + map.early_rows_offset(epoch);
    setup.scales[peer] = control + map.early_scales_offset(epoch);
    setup.weights[peer] = reinterpret_cast<float*>(
        control + map.early_weights_offset(epoch, static_cast<uint32_t>(me.rank))
    );
    setup.signals[peer] = signal_of(me, peer, 0);
    setup.place[peer] = Place::kEarly;
    setup.first_row[peer] = static_cast<int32_t>(first);
  }
  __syncthreads();
}

WEFT_HD PlanSharedMap shared_map(const PlanLaunch& call) {
  const PlanMap& map = call.plan.map;
  return {map.num_ranks, map.num_experts, map.max_tokens * static_cast<uint32_t>(call.topk)};
}

extern __shared__ __align__(128) std::byte routed_shared[];

__device__ void run_plan(const PlanLaunch& call, uint32_t epoch, SmallPlanShared& small) {
  send_routing(call, epoch);
  make_routed_plan(call, epoch, carve(shared_map(call), routed_shared, small));
}

__global__ void __launch_bounds__(kRoutedThreads, 1)
    dispatch_routed_vector(const __grid_constant__ RoutedDispatchLaunch call) {
  __shared__ SmallPlanShared small;
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  __shared__ SeenPlan seen;
  const DispatchLaunch& rows = call.dispatch;
  const uint32_t epoch = current_epoch(rows.me);
  const int block = static_cast<int>(blockIdx.x) - call.plan.num_blocks;
  if (block < 0) {
    run_plan(call.plan, epoch, small);
  } else {
    clear_progress(progress);
    set_places(setup, seen, rows.me, epoch);
    const RoleBlock place = {block, call.num_blocks - call.plan.num_blocks};
    Push push(rows, setup, progress, place);
    if (warp_in_block() == kMoverWarps) {
      push.run_signals();
    } else if (warp_in_block() == kWordWarp && block == 0) {
      accept_plan_words(call.plan, epoch, setup.own());
    } else if (warp_in_block() == kWatchWarp) {
      watch_plan(call.plan, setup, seen);
    } else if (warp_in_block() < kMoverWarps) {
      push.run_vector();
      EarlyFanOut(rows, setup, seen, place).run(MoveEarlyRowVector{});
    }
  }
  finish_call(rows.me, epoch);
}

__global__ void __launch_bounds__(kRoutedThreads, 1)
    dispatch_routed_bulk(const __grid_constant__ RoutedDispatchLaunch call) {
#if __CUDA_ARCH__ >= 900
  __shared__ SmallPlanShared small;
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  __shared__ SeenPlan seen;
  __shared__ uint64_t full[kMoverWarps * kBulkStages];
  const DispatchLaunch& rows = call.dispatch;
  const uint32_t epoch = current_epoch(rows.me);
  const int block = static_cast<int>(blockIdx.x) - call.plan.num_blocks;
  if (block < 0) {
    run_plan(call.plan, epoch, small);
  } else {
    clear_progress(progress);
    set_places(setup, seen, rows.me, epoch);
    const RoleBlock place = {block, call.num_blocks - call.plan.num_blocks};
    Push push(rows, setup, progress, place);
    const int warp = warp_in_block();
    if (warp == kMoverWarps) {
      push.run_signals();
    } else if (warp == kWordWarp && block == 0) {
      accept_plan_words(call.plan, epoch, setup.own());
    } else if (warp == kWatchWarp) {
      watch_plan(call.plan, setup, seen);
    } else if (warp < kMoverWarps) {
      BulkRing ring(routed_shared + warp * kBulkStages * kBulkPiece, full + warp * kBulkStages);
      push.run_bulk(ring);
      EarlyFanOut(rows, setup, seen, place).run(MoveEarlyRowBulk{ring});
    }
  }
  ptx::wait_stores<0>();
  finish_call(rows.me, epoch);
#endif
}

// The plan's blocks need room too.
int shared_bytes(const RoutedDispatchLaunch& call, int of_rows) {
  return std::max(of_rows, static_cast<int>(shared_map(call.plan).num_bytes()));
}

}  // namespace

void prepare_routed_dispatch() {
  const Context nobody;
  int device = 0;
  int most = 0;
  WEFT_CUDA(nobody, cudaGetDevice(&device));
  WEFT_CUDA(nobody, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  for (const auto kernel : {dispatch_routed_vector, dispatch_routed_bulk}) {
    cudaFuncAttributes attributes{};
    WEFT_CUDA(nobody, cudaFuncGetAttributes(&attributes, kernel));
    const int room = most - static_cast<int>(attributes.sharedSizeBytes);
    WEFT_CUDA(
        nobody, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room)
    );
  }
}

void launch_routed_dispatch(const RoutedDispatchLaunch& call, cudaStream_t stream) {
  const bool is_bulk = call.dispatch.mover == Mover::kBulk;
  const auto kernel = is_bulk ? dispatch_routed_bulk : dispatch_routed_vector;
  const auto shared = static_cast<size_t>(shared_bytes(call, is_bulk ? kBulkSharedBytes : 0));
  kernel<<<static_cast<unsigned>(call.num_blocks), kRoutedThreads, shared, stream>>>(call);
  WEFT_CUDA(Context{}, cudaGetLastError());
}

}  // namespace weft
