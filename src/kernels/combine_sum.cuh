// SPDX-License-Identifier: Apache-2.0
// The sum role of combine: a warp takes a chunk of this rank's tokens, waits until every rank has
// returned its arrivals, and adds each token's arrivals in ascending rank order. Before that, if
// the call is scaled by weights of this side, it sends them to the experts' ranks.
#pragma once

#include "kernels/launch.hpp"
#include "kernels/row_sum.cuh"

namespace weft {

template <class Element>
class CombineSum {
 public:
  __device__ CombineSum(const CombineLaunch& call, const CallSetup& setup)
      : call_(call), setup_(setup), me_(call.me) {
    const int warps_per_block = static_cast<int>(blockDim.x) / kWarpLanes;
    warp_ = static_cast<int>(blockIdx.x) - call.num_reduce + warp_in_block() * call.num_sum;
    num_warps_ = warps_per_block * call.num_sum;
    max_topk_ = static_cast<int>(call.plan.map.max_topk);
    num_tokens_ = call.plan.header()->num_tokens;
    pieces_ = cut_row(call.row_bytes, kSumPiece);
  }

  __device__ void run() {
    if (call_.has_source_weights) {
      send_weights();
    }
    const int chunk_size = chunk_tokens(num_tokens_);
    const int chunks = num_device_chunks(num_tokens_);
    for (int chunk = warp_; chunk < chunks; chunk += num_warps_) {
      if (!wait_returned(chunk)) {
        return;
      }
      const int end = min((chunk + 1) * chunk_size, num_tokens_);
      for (int token = chunk * chunk_size; token < end; ++token) {
        sum(token);
      }
    }
  }

 private:
  __device__ __forceinline__ bool wait_returned(int chunk) const {
    bool is_here = true;
    const int peer = lane_index();
    if (peer < me_.num_ranks) {
      const WaitSite site = {DeviceOp::kCombine, setup_.epoch, peer, WaitFor::kRows};
      const auto slot =
          me_.map.signals().combine(static_cast<uint32_t>(peer), static_cast<uint32_t>(chunk));
      is_here = wait_reached(me_, signal_of(me_, me_.rank, slot), setup_.epoch, site);
    }
    return __all_sync(kAllLanes, is_here);
  }

  __device__ __forceinline__ void sum(int token) const {
    const int lane = lane_index();
    // Ranks the token went to, and those of them where a row was kept.
    bool is_sent = false;
    bool is_kept = false;
    if (lane < me_.num_ranks) {
      const int64_t pair = static_cast<int64_t>(token) * me_.num_ranks + lane;
      is_sent = call_.plan.arrival()[pair] >= 0;
      is_kept = call_.plan.primary()[pair] >= 0;
    }
    const uint32_t sent = __ballot_sync(kAllLanes, is_sent);
    const uint32_t kept = __ballot_sync(kAllLanes, is_kept);
    const int count = __popc(kept);
    // Lane i learns where the i-th kept arrival lies among the sent ones.
    int place = 0;
    if (lane < count) {
      const auto rank = __fns(kept, 0, lane + 1);
      place = __popc(sent & ((1U << rank) - 1U));
    }
    const int per_token = min(me_.num_ranks, call_.topk);
    const std::byte* first =
        call_.staged + static_cast<int64_t>(token) * per_token * call_.row_bytes;
    std::byte* out = call_.out + static_cast<int64_t>(token) * call_.row_bytes;
    for (int piece = 0; piece < pieces_.count; ++piece) {
      const int32_t offset = piece * pieces_.each;
      const int32_t bytes = pieces_.bytes(piece);
      PieceBits result = {};
      if (count > 0) {
        result = sum_piece<Element, false>(
            count,
            bytes,
            [&](int i) {
              const int64_t row = __shfl_sync(kAllLanes, place, i);
              return first + row * call_.row_bytes + offset;
            },
            [](int) { return 1.0F; }
        );
      }
      store_piece(out + offset, bytes, result);
    }
    if (call_.out_weights != nullptr) {
      return_weights(token);
    }
  }

  __device__ __forceinline__ void return_weights(int token) const {
    const int lane = lane_index();
    const int64_t route = static_cast<int64_t>(token) * max_topk_ + lane;
    float weight = 0;
    bool is_kept = false;
    if (lane < call_.topk) {
      is_kept = call_.plan.route_slot()[route] >= 0;
      const auto* returned = reinterpret_cast<const volatile float*>(
          control_of(me_, me_.rank) + me_.map.returned_offset()
      );
      weight = is_kept ? returned[route] : 0.0F;
    }
    if (!call_.from_map) {
      if (lane < call_.topk) {
        call_.out_weights[static_cast<int64_t>(token) * call_.topk + lane] = weight;
      }
      return;
    }
    const int num_experts = static_cast<int>(me_.map.num_experts);
    float* out = call_.out_weights + static_cast<int64_t>(token) * num_experts;
    for (int expert = lane; expert < num_experts; expert += kWarpLanes) {
      out[expert] = 0;
    }
    __syncwarp();
    if (is_kept) {
      out[call_.plan.route_expert()[route]] = weight;
    }
  }

  // kSourceWeights: [arrival][k] to each rank the token went to; the last warp tells all ranks.
  __device__ void send_weights() const {
    const int lane = lane_index();
    for (int token = warp_; token < num_tokens_; token += num_warps_) {
      float weight = 0;
      if (lane < call_.topk) {
        int64_t at = static_cast<int64_t>(token) * call_.topk + lane;
        bool is_route = true;
        if (call_.from_map) {
          const int32_t expert =
              call_.plan.route_expert()[static_cast<int64_t>(token) * max_topk_ + lane];
          is_route = expert >= 0;
          at = static_cast<int64_t>(token) * me_.map.num_experts + expert;
        }
        weight = is_route ? call_.source_weights[at] : 0.0F;
      }
      std::byte* mine = nullptr;
      if (lane < me_.num_ranks) {
        const int32_t arrival =
            call_.plan.arrival()[static_cast<int64_t>(token) * me_.num_ranks + lane];
        if (arrival >= 0) {
          mine = reinterpret_cast<std::byte*>(
              setup_.weights[lane] + static_cast<int64_t>(arrival) * max_topk_
          );
        }
      }
      for_each_target({mine, nullptr}, [&](std::byte* target) {
        if (lane < call_.topk) {
          reinterpret_cast<float*>(target)[lane] = weight;
        }
      });
    }
    __syncwarp();
    uint32_t is_last = 0;
    if (lane == 0) {
      ptx::fence_sys();
      is_last = ptx::add_acq_rel_gpu(&me_.local->grid, 1) + 1 == static_cast<uint32_t>(num_warps_)
                    ? 1U
                    : 0U;
    }
    is_last = __shfl_sync(kAllLanes, is_last, 0);
    if (is_last != 0 && lane < me_.num_ranks) {
      ptx::fence_sys();
      const auto slot = me_.map.signals().source_weights(static_cast<uint32_t>(me_.rank));
      ptx::store_relaxed_sys(setup_.signals[lane] + slot, setup_.epoch);
    }
  }

  const CombineLaunch& call_;
  const CallSetup& setup_;
  const RankView& me_;
  int warp_;
  int num_warps_;
  int max_topk_;
  int num_tokens_;
  Pieces pieces_;
};

}  // namespace weft
