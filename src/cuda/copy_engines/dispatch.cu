// SPDX-License-Identifier: Apache-2.0
// dispatch by copy engines: the kernels before and after the copies (copies.cpp). In the first all
// blocks have the push role and pack rows for each peer in this rank's memory; in the second all
// have the fan-out role and store what copy engines have brought in its slots. Rows are loaded from
// and stored to this GPU's memory only. Before: dispatch/call.cpp; after: the caller's experts.
#include "cuda/copy_engines/call.cuh"
#include "cuda/device/kernel.cuh"
#include "cuda/dispatch/fan_out.cuh"
#include "cuda/dispatch/push.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {
namespace {

constexpr int kThreads = kMoverWarps * kWarpLanes;

__device__ RoleBlock this_block() {
  return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
}

using Push = DispatchPush<PlannedRoutes>;
using FanOut = DispatchFanOut<true>;

template <class Mover>
__global__ void __launch_bounds__(kThreads, 1)
    pack_rows(const __grid_constant__ DispatchLaunch call) {
  if constexpr (Mover::kIsCompiled) {
    __shared__ CallSetup setup;
    __shared__ TeamProgress progress;  // no warp looks at it
    __shared__ uint64_t full[kMoverWarps * Mover::kBarriers];
    const int warp = warp_in_block();
    Mover mover(call.me, warp, full + warp * Mover::kBarriers);
    if (begin_pack(setup, call)) {
      Push push(call, setup, progress, this_block());
      push.run(mover);
    }
    Mover::finish();
    finish_pack(setup, call.me, call.copied);
  }
}

template <class Mover>
__global__ void __launch_bounds__(kThreads, 1)
    fan_out_rows(const __grid_constant__ DispatchLaunch call) {
  if constexpr (Mover::kIsCompiled) {
    __shared__ CallSetup setup;
    __shared__ uint64_t full[kMoverWarps * Mover::kBarriers];
    const int warp = warp_in_block();
    Mover mover(call.me, warp, full + warp * Mover::kBarriers);
    if (begin_receive(setup, call)) {
      FanOut fan_out(call, setup, this_block());
      fan_out.run(mover);
    }
    Mover::finish();
    finish_receive(setup, call.me);
  }
}

struct Kernels {
  Kernel<DispatchLaunch> pack;
  Kernel<DispatchLaunch> fan_out;
};

template <class Mover>
Kernels kernels_with() {
  return {
      {pack_rows<Mover>, kThreads, Mover::kSharedBytes},
      {fan_out_rows<Mover>, kThreads, Mover::kSharedBytes}};
}

Kernels kernels_of(Mover mover) {
  return mover == Mover::kBulk ? kernels_with<BulkMover>() : kernels_with<VectorMover>();
}

}  // namespace

void prepare_copied_dispatch() {
  for (const Mover mover : {Mover::kVector, Mover::kBulk}) {
    const Kernels kernels = kernels_of(mover);
    prepare(kernels.pack);
    prepare(kernels.fan_out);
  }
}

void launch_dispatch_pack(const DispatchLaunch& call, cudaStream_t stream) {
  launch(kernels_of(call.mover).pack, call.num_push, call, stream);
}

void launch_dispatch_fan_out(const DispatchLaunch& call, cudaStream_t stream) {
  launch(kernels_of(call.mover).fan_out, call.num_fan_out, call, stream);
}

}  // namespace weft
