// SPDX-License-Identifier: Apache-2.0
// dispatch on a GPU, one launch whose blocks have two roles: the first push this rank's rows to its
// peers (push.cuh), the others fan out the rows that have come (fan_out.cuh). Before:
// dispatch/call.cpp; after: the caller's experts.
#include "cuda/device/kernel.cuh"
#include "cuda/dispatch/extras.cuh"
#include "cuda/dispatch/fan_out.cuh"
#include "cuda/dispatch/push.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// Where the fan-out role finds what sources have pushed, and when. Everything lies in this rank's
// staging, packed by arrival, except for rows that sources wrote to their primary slots.
class StagedItems {
 public:
  __device__ StagedItems(const DispatchLaunch& call, const CallSetup& setup)
      : call_(call), setup_(setup) {}

  // All lanes of a warp wait until the item is here. Returns false if the call is given up.
  [[nodiscard]] __device__ __forceinline__ bool wait(const ArrivalRecords& records) const {
    const RankView& me = call_.me;
    const auto slot = me.map.signals().dispatch(
        static_cast<uint32_t>(records.source), static_cast<uint32_t>(records.chunk)
    );
    const WaitSite site = {Op::kDispatch, setup_.epoch, records.source, WaitFor::kRows};
    return wait_reached_warp(me, signal_of(me, me.rank, slot), setup_.epoch, site);
  }

  // Whether rows lie in staging too.
  [[nodiscard]] __device__ __forceinline__ bool has_rows() const {
    return call_.place == Place::kStaging;
  }

  // What follows gives the address of the item's first arrival; the others lie behind it.
  [[nodiscard]] __device__ __forceinline__ const std::byte* rows(
      const ArrivalRecords& records, int64_t row_bytes
  ) const {
    return call_.staged_rows + place(records) * row_bytes;
  }

  [[nodiscard]] __device__ __forceinline__ const std::byte* scales(const ArrivalRecords& records
  ) const {
    return call_.staged_scales + place(records) * call_.payload.staged_scale_bytes();
  }

  [[nodiscard]] __device__ __forceinline__ const float* weights(const ArrivalRecords& records
  ) const {
    const RankView& me = call_.me;
    const uint64_t all = me.map.weights_offset(static_cast<uint32_t>(records.source));
    return reinterpret_cast<const float*>(control_of(me, me.rank) + all) +
           static_cast<int64_t>(records.begin) * me.map.max_topk;
  }

 private:
  [[nodiscard]] __device__ __forceinline__ int64_t place(const ArrivalRecords& records) const {
    return setup_.received_base[records.source] + records.begin;
  }

  const DispatchLaunch& call_;
  const CallSetup& setup_;
};
namespace {

using Push = DispatchPush<PlannedRoutes>;
using FanOut = DispatchFanOut<StagedItems>;

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
    Mover mover(index, full + warp * Mover::kBarriers);
    if (begin_call(setup, call.me, call.plan, word_of(call))) {
      const bool is_signaller = warp == kMoverWarps;
      const int block = static_cast<int>(blockIdx.x);
      if (block < call.num_push) {
        Push push(call, setup, progress, {block, call.num_push});
        is_signaller ? push.run_signals() : push.run(mover);
      } else if (!is_signaller) {
        FanOut fan_out(call, setup, {block - call.num_push, call.num_fan_out});
        fan_out.run(mover);
      }
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
