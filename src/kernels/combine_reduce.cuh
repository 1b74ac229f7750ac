// SPDX-License-Identifier: Apache-2.0
// The pre-reduce role of combine: a warp takes the arrivals that one chunk of one rank's tokens
// made here, sums the rows of each and stores one row per arrival in that rank's staging, weight
// gradients with it; then one signal.
#pragma once

#include "kernels/launch.hpp"
#include "kernels/row_sum.cuh"

namespace weft {

template <class Element, bool kScaled>
class CombineReduce {
 public:
  __device__ CombineReduce(const CombineLaunch& call, const CallSetup& setup)
      : call_(call), setup_(setup), me_(call.me) {
    const int warps_per_block = static_cast<int>(blockDim.x) / kWarpLanes;
    warp_ = static_cast<int>(blockIdx.x) + warp_in_block() * call.num_reduce;
    num_warps_ = warps_per_block * call.num_reduce;
    max_topk_ = static_cast<int>(call.plan.map.max_topk);
    pieces_ = cut_row(call.row_bytes, kSumPiece);
  }

  __device__ void run() {
    if (call_.has_source_weights && !wait_source_weights()) {
      return;
    }
    const int items = num_items(me_, setup_);
    for (int index = warp_; index < items; index += num_warps_) {
      const ChunkItem item = item_at(me_, index);
      if (item.chunk >= num_device_chunks(setup_.tokens[item.source])) {
        continue;
      }
      const ChunkArrivals arrivals = arrivals_of(call_.plan, item.source, item.chunk);
      for (int arrival = arrivals.begin; arrival < arrivals.end; ++arrival) {
        reduce(item.source, arrival);
      }
      __syncwarp();
      if (lane_index() == 0) {
        ptx::fence_sys();
        const auto slot = me_.map.signals().combine(
            static_cast<uint32_t>(me_.rank), static_cast<uint32_t>(item.chunk)
        );
        ptx::store_relaxed_sys(setup_.signals[item.source] + slot, setup_.epoch);
      }
    }
  }

 private:
  // Weights that the tokens' ranks hand in, of every rank at once.
  __device__ bool wait_source_weights() const {
    bool is_here = true;
    const int source = lane_index();
    if (source < me_.num_ranks) {
      const WaitSite site = {DeviceOp::kCombine, setup_.epoch, source, WaitFor::kSourceWeights};
      const auto slot = me_.map.signals().source_weights(static_cast<uint32_t>(source));
      is_here = wait_reached(me_, signal_of(me_, me_.rank, slot), setup_.epoch, site);
    }
    return __all_sync(kAllLanes, is_here);
  }

  __device__ __forceinline__ void reduce(int source, int arrival) const {
    const auto from = static_cast<uint32_t>(source);
    const ArrivalHead head = call_.plan.heads(from)[arrival];
    if (head.num_routes == 0) {
      return;
    }
    const int lane = lane_index();
    const int64_t first = static_cast<int64_t>(arrival) * max_topk_;
    int32_t slot = 0;
    int32_t k = -1;
    if (lane < head.num_routes) {
      slot = call_.plan.slots(from)[first + lane];
      k = call_.plan.origins(from)[first + lane] & 0xff;
    }
    float scale = 1;
    if constexpr (kScaled) {
      if (k >= 0) {
        scale = call_.scale == CombineScale::kPlanWeights ? call_.plan.weights(from)[first + lane]
                                                          : source_weight(from, first + k);
      }
    }
    if (call_.row_weights != nullptr && k >= 0) {
      const int64_t at = call_.one_row ? static_cast<int64_t>(slot) * call_.topk + k : slot;
      float* returned =
          reinterpret_cast<float*>(control_of(me_, source) + me_.map.returned_offset());
      returned[static_cast<int64_t>(head.token) * max_topk_ + k] = call_.row_weights[at];
    }
    const int count = call_.one_row ? 1 : head.num_routes;
    std::byte* out = setup_.rows[source] + head.return_row * call_.row_bytes;
    for (int piece = 0; piece < pieces_.count; ++piece) {
      const int32_t offset = piece * pieces_.each;
      const int32_t bytes = pieces_.bytes(piece);
      const PieceBits sum = sum_piece<Element, kScaled>(
          count,
          bytes,
          [&](int row) {
            const int64_t of_row = __shfl_sync(kAllLanes, slot, row);
            return call_.rows + of_row * call_.row_bytes + offset;
          },
          [&](int row) { return __shfl_sync(kAllLanes, scale, row); }
      );
      store_piece(out + offset, bytes, sum);
    }
  }

  [[nodiscard]] __device__ __forceinline__ float source_weight(uint32_t source, int64_t at) const {
    const auto* weights = reinterpret_cast<const volatile float*>(
        control_of(me_, me_.rank) + me_.map.weights_offset(source)
    );
    return weights[at];
  }

  const CombineLaunch& call_;
  const CallSetup& setup_;
  const RankView& me_;
  int warp_;
  int num_warps_;
  int max_topk_;
  Pieces pieces_;
};

}  // namespace weft
