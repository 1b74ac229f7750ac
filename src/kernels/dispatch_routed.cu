// SPDX-License-Identifier: Apache-2.0
// A plan and the dispatch by it in one launch, for calls of few tokens, whose latency decides: the
// first blocks make the plan (plan_make.cuh) while the others push rows to where no plan has to say
// (dispatch_push.cuh); then those wait for the plan and fan out (dispatch_fan_out.cuh). Previous in
// the data flow: exchange/dispatch_routed_call_cuda.cpp.
#include <algorithm>

#include "core/check_cuda.hpp"
#include "kernels/dispatch_fan_out.cuh"
#include "kernels/dispatch_push.cuh"
#include "kernels/plan_make.cuh"

namespace weft {
namespace {

static_assert(kRoutedThreads >= kRoleThreads && kRoutedThreads <= kMaxPlanThreads);

constexpr unsigned kMoversBarrier = 1;  // 0 is everybody's

using Push = DispatchPush<EarlyRoutes>;
using FanOut = DispatchFanOut<true>;

// One thread: until the counts of the plan are ahead of the rows, behind which they would queue for
// as long as those take. For some time only, as nothing depends on it.
__device__ void let_counts_go_first(const RankView& me, uint32_t epoch) {
  constexpr uint64_t kMostNanoseconds = 20'000;
  const volatile uint32_t* told = &me.local->told;
  const uint64_t begin = ptx::nanoseconds();
  while (*told != epoch && ptx::nanoseconds() - begin < kMostNanoseconds) {
    __nanosleep(20);
  }
}

// All threads of a block: places that depend on nothing that peers would have to say.
__device__ void set_places(CallSetup& setup, const RankView& me, uint32_t epoch) {
  if (threadIdx.x == 0) {
    setup.epoch = epoch;
    setup.failures = 0;
  } else if (threadIdx.x == kWarpLanes) {
    let_counts_go_first(me, epoch);
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
    setup.place[peer] = DevicePlace::kEarly;
    setup.first_row[peer] = static_cast<int32_t>(first);
  }
  __syncthreads();
}

// All threads that move rows: until this rank's plan is made and the records of all
// ranks are in it. False if the call is given up.
__device__ bool await_plan(CallSetup& setup, const DispatchLaunch& call) {
  const RankView& me = call.me;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < me.num_ranks) {
    const WaitSite site = {DeviceOp::kPlan, setup.epoch, peer, WaitFor::kRecords};
    const auto slot = me.map.signals().records(static_cast<uint32_t>(peer));
    // The blocks that plan know who is missing.
    if (!wait_reached(me, signal_of(me, me.rank, slot), setup.epoch, site, 2)) {
      atomicAdd(&setup.failures, 1U);
    }
  }
  __barrier_sync_count(kMoversBarrier, kMoverWarps * kWarpLanes);
  if (peer < me.num_ranks) {
    setup.tokens[peer] = call.plan.tokens_of()[peer];
  }
  __barrier_sync_count(kMoversBarrier, kMoverWarps * kWarpLanes);
  return setup.failures == 0;
}

extern __shared__ __align__(128) std::byte routed_shared[];

__device__ void run_plan(const PlanLaunch& call, uint32_t epoch, SmallPlanShared& small) {
  const PlanMap& map = call.plan.map;
  make_plan(call, epoch, carve({map.num_ranks, map.num_experts}, routed_shared, small));
}

__global__ void __launch_bounds__(kRoutedThreads, 1)
    dispatch_routed_vector(const __grid_constant__ RoutedDispatchLaunch call) {
  __shared__ SmallPlanShared small;
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  const DispatchLaunch& rows = call.dispatch;
  const uint32_t epoch = current_epoch(rows.me);
  const int block = static_cast<int>(blockIdx.x) - call.plan.num_blocks;
  if (block < 0) {
    run_plan(call.plan, epoch, small);
  } else {
    clear_progress(progress);
    set_places(setup, rows.me, epoch);
    const RoleBlock place = {block, call.num_blocks - call.plan.num_blocks};
    Push push(rows, setup, progress, place);
    if (warp_in_block() == kMoverWarps) {
      push.run_signals();
    } else if (warp_in_block() < kMoverWarps) {
      push.run_vector();
      if (await_plan(setup, rows)) {
        FanOut(rows, setup, place).run(MoveRowsVector{});
      }
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
  __shared__ uint64_t full[kMoverWarps * kBulkStages];
  const DispatchLaunch& rows = call.dispatch;
  const uint32_t epoch = current_epoch(rows.me);
  const int block = static_cast<int>(blockIdx.x) - call.plan.num_blocks;
  if (block < 0) {
    run_plan(call.plan, epoch, small);
  } else {
    clear_progress(progress);
    set_places(setup, rows.me, epoch);
    const RoleBlock place = {block, call.num_blocks - call.plan.num_blocks};
    Push push(rows, setup, progress, place);
    const int warp = warp_in_block();
    if (warp == kMoverWarps) {
      push.run_signals();
    } else if (warp < kMoverWarps) {
      BulkRing ring(routed_shared + warp * kBulkStages * kBulkPiece, full + warp * kBulkStages);
      push.run_bulk(ring);
      if (await_plan(setup, rows)) {
        FanOut(rows, setup, place).run(MoveRowsBulk{ring});
      }
    }
  }
  ptx::wait_stores<0>();
  finish_call(rows.me, epoch);
#endif
}

// The plan's blocks need room too.
int shared_bytes(const RoutedDispatchLaunch& call, int of_rows) {
  const PlanMap& map = call.plan.plan.map;
  const PlanSharedMap plan = {map.num_ranks, map.num_experts};
  return std::max(of_rows, static_cast<int>(plan.num_bytes()));
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
