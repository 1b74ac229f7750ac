// SPDX-License-Identifier: Apache-2.0
// dispatch on a GPU: one launch, blocks of two roles (dispatch_push.cuh, dispatch_fan_out.cuh).
// Previous in the data flow: exchange/dispatch_call_cuda.cpp; next: the caller's experts.
#include "kernels/dispatch_fan_out.cuh"
#include "kernels/dispatch_push.cuh"
#include "kernels/dispatch_staged.cuh"
#include "kernels/kernel.cuh"
#include "kernels/launch.hpp"

namespace weft {
namespace {

using Push = DispatchPush<PlannedRoutes>;
using FanOut = DispatchFanOut<StagedItems>;

__global__ void __launch_bounds__(kRoleThreads, 1)
    dispatch_vector(const __grid_constant__ DispatchLaunch call) {
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  clear_progress(progress);
  if (begin_call(setup, call.me, call.plan, word_of(call))) {
    const bool is_signaller = warp_in_block() == kMoverWarps;
    const int block = static_cast<int>(blockIdx.x);
    if (block < call.num_push) {
      Push push(call, setup, progress, {block, call.num_push});
      is_signaller ? push.run_signals() : push.run_vector();
    } else if (!is_signaller) {
      FanOut fan_out(call, setup, {block - call.num_push, call.num_fan_out});
      fan_out.run(MoveRowsVector{});
    }
  }
  finish_call(call.me, setup.epoch);
}

__global__ void __launch_bounds__(kRoleThreads, 1)
    dispatch_bulk(const __grid_constant__ DispatchLaunch call) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte stages[];
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  clear_progress(progress);
  __shared__ uint64_t full[(kMoverWarps + 1) * kBulkStages];
  const int warp = warp_in_block();
  const int mover = warp < kMoverWarps ? warp : 0;
  BulkRing ring(stages + mover * kBulkStages * kBulkPiece, full + warp * kBulkStages);
  if (begin_call(setup, call.me, call.plan, word_of(call))) {
    const bool is_signaller = warp == kMoverWarps;
    const int block = static_cast<int>(blockIdx.x);
    if (block < call.num_push) {
      Push push(call, setup, progress, {block, call.num_push});
      is_signaller ? push.run_signals() : push.run_bulk(ring);
    } else if (!is_signaller) {
      FanOut fan_out(call, setup, {block - call.num_push, call.num_fan_out});
      fan_out.run(MoveRowsBulk{ring});
    }
  }
  ptx::wait_stores<0>();
  finish_call(call.me, setup.epoch);
#endif
}

Kernel<DispatchLaunch> kernel_of(Mover mover) {
  return mover == Mover::kBulk
             ? Kernel<DispatchLaunch>{dispatch_bulk, kRoleThreads, kBulkSharedBytes}
             : Kernel<DispatchLaunch>{dispatch_vector, kRoleThreads};
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
