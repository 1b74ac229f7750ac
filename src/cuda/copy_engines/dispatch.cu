// SPDX-License-Identifier: Apache-2.0
// dispatch by copy engines, before and after the copies (exchange/copies_cuda.cpp): the push role
// alone packs rows for each peer in this rank's memory; the fan-out role alone stores what has been
// copied in its slots. Kernels of many blocks wait for nothing but this GPU's memory.
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

// What the fan-out role asks of where rows are, and when.
class CopiedItems {
 public:
  __device__ CopiedItems(const DispatchLaunch& call, const CallSetup& setup)
      : call_(call), setup_(setup) {}

  [[nodiscard]] __device__ __forceinline__ bool wait(const ArrivalRecords& /*records*/) const {
    return true;
  }
  [[nodiscard]] __device__ __forceinline__ bool has_rows() const { return true; }

  [[nodiscard]] __device__ __forceinline__ const std::byte* rows(
      const ArrivalRecords& records, int64_t row_bytes
  ) const {
    return setup_.rows[records.source] + records.begin * row_bytes;
  }
  [[nodiscard]] __device__ __forceinline__ const std::byte* scales(const ArrivalRecords& records
  ) const {
    return setup_.scales[records.source] + records.begin * call_.copied.rows.scale_bytes;
  }
  [[nodiscard]] __device__ __forceinline__ const float* weights(const ArrivalRecords& records
  ) const {
    return setup_.weights[records.source] +
           static_cast<int64_t>(records.begin) * call_.me.map.max_topk;
  }

 private:
  const DispatchLaunch& call_;
  const CallSetup& setup_;
};

using Push = DispatchPush<PlannedRoutes>;
using FanOut = DispatchFanOut<CopiedItems>;

__global__ void __launch_bounds__(kThreads, 1)
    pack_vector(const __grid_constant__ DispatchLaunch call) {
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;  // nobody looks at it
  if (begin_pack(setup, call.me, call.plan, word_of(call), call.copied, CopiedWay::kOut)) {
    Push push(call, setup, progress, this_block());
    push.run_vector();
  }
  finish_pack(setup, call.me);
}

__global__ void __launch_bounds__(kThreads, 1)
    fan_out_vector(const __grid_constant__ DispatchLaunch call) {
  __shared__ CallSetup setup;
  if (begin_receive(setup, call.me, call.plan, word_of(call), call.copied, CopiedWay::kOut)) {
    FanOut fan_out(call, setup, this_block());
    fan_out.run(MoveRowsVector{});
  }
  finish_call(call.me, setup.epoch);
}

__global__ void __launch_bounds__(kThreads, 1)
    pack_bulk(const __grid_constant__ DispatchLaunch call) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte stages[];
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  __shared__ uint64_t full[kMoverWarps * kBulkStages];
  const int warp = warp_in_block();
  BulkRing ring(stages + warp * kBulkStages * kBulkPiece, full + warp * kBulkStages);
  if (begin_pack(setup, call.me, call.plan, word_of(call), call.copied, CopiedWay::kOut)) {
    Push push(call, setup, progress, this_block());
    push.run_bulk(ring);
  }
  ptx::wait_stores<0>();
  finish_pack(setup, call.me);
#endif
}

__global__ void __launch_bounds__(kThreads, 1)
    fan_out_bulk(const __grid_constant__ DispatchLaunch call) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte stages[];
  __shared__ CallSetup setup;
  __shared__ uint64_t full[kMoverWarps * kBulkStages];
  const int warp = warp_in_block();
  BulkRing ring(stages + warp * kBulkStages * kBulkPiece, full + warp * kBulkStages);
  if (begin_receive(setup, call.me, call.plan, word_of(call), call.copied, CopiedWay::kOut)) {
    FanOut fan_out(call, setup, this_block());
    fan_out.run(MoveRowsBulk{ring});
  }
  ptx::wait_stores<0>();
  finish_call(call.me, setup.epoch);
#endif
}

struct Kernels {
  Kernel<DispatchLaunch> pack;
  Kernel<DispatchLaunch> fan_out;
};

Kernels kernels_of(Mover mover) {
  if (mover == Mover::kBulk) {
    return {{pack_bulk, kThreads, kBulkSharedBytes}, {fan_out_bulk, kThreads, kBulkSharedBytes}};
  }
  return {{pack_vector, kThreads}, {fan_out_vector, kThreads}};
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
