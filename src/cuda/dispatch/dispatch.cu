// SPDX-License-Identifier: Apache-2.0
// dispatch on a GPU, one launch whose blocks have two roles: the first push this rank's rows to its
// peers (push.cuh), the others fan out the rows that have come (fan_out.cuh), and the first join
// the others when done pushing. Before: dispatch/call.cpp; after: the caller's experts.
#include "cuda/device/kernel.cuh"
#include "cuda/dispatch/fan_out.cuh"
#include "cuda/dispatch/push.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

namespace {

using Push = DispatchPush<PlannedRoutes>;
using FanOut = DispatchFanOut<false>;

template <class Mover>
__global__ void __launch_bounds__(kRoleThreads, 1)
    dispatch_rows(const __grid_constant__ DispatchLaunch call) {
  if constexpr (Mover::kIsCompiled) {
    __shared__ CallSetup setup;
    __shared__ TeamProgress progress;
    clear_progress(progress);
    __shared__ uint64_t full[(kMoverWarps + 1) * Mover::kBarriers];
    const int warp = warp_in_block();
    const int index = warp < kMoverWarps ? warp : 0;
    Mover mover(call.me, index, full + warp * Mover::kBarriers);
    if (begin_call(setup, call)) {
      const bool is_signaller = warp == kMoverWarps;
      const int block = static_cast<int>(blockIdx.x);
      const bool is_push = block < call.num_push;
      if (is_push) {
        Push push(call, setup, progress, {block, call.num_push});
        is_signaller ? push.run_signals() : push.run(mover);
      }
      if (!is_signaller) {
        const int index = is_push ? kJoining : block - call.num_push;
        FanOut fan_out(call, setup, {index, call.num_fan_out});
        fan_out.run(mover);
      }
    } else if (blockIdx.x == 0 && warp == 0) {
      tell_no_counts(call);
    }
    Mover::finish();
    finish_call(call.me, setup.epoch);
  }
}

Kernel<DispatchLaunch> kernel_of(Mover mover) {
  return mover == Mover::kBulk
             ? Kernel<
                   DispatchLaunch>{dispatch_rows<BulkMover>, kRoleThreads, BulkMover::kSharedBytes}
             : Kernel<DispatchLaunch>{dispatch_rows<VectorMover>, kRoleThreads};
}

}  // namespace

void prepare_dispatch() {
  prepare(kernel_of(Mover::kVector));
  prepare(kernel_of(Mover::kBulk));
}

void launch_dispatch(const DispatchLaunch& call, cudaStream_t stream) {
  launch(kernel_of(call.mover), call.num_push + call.num_fan_out, call, stream);
}

}  // namespace weft
