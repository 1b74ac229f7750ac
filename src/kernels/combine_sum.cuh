// SPDX-License-Identifier: Apache-2.0
// The sum role of combine: a team of warps takes a chunk of this rank's tokens, waits until every
// rank has returned its arrivals, and adds each token's arrivals in ascending rank order. Before
// that, if the call is scaled by weights of this side, it sends them to the experts' ranks.
#pragma once

#include "kernels/launch.hpp"
#include "kernels/row_sum.cuh"

namespace weft {

class CombineSum {
 public:
  static constexpr bool kScales = false;
  static constexpr bool kStoresEmpty = true;  // a token without routes gets zeros

  __device__ CombineSum(const CombineLaunch& call, const CallSetup& setup, const Team& team)
      : call_(call), setup_(setup), me_(call.me), team_(team) {
    max_topk_ = static_cast<int>(call.plan.map.max_topk);
    num_tokens_ = call.plan.header()->num_tokens;
    per_token_ = min(me_.num_ranks, call.topk);
  }

  // The warps that add, before anything else.
  __device__ void begin() const {
    if (call_.has_source_weights) {
      send_weights();
    }
  }

  [[nodiscard]] __device__ __forceinline__ bool is_open() const { return true; }

  struct Place {
    int32_t ordinal = -1;
    int32_t chunk = 0;
    int32_t first = 0;  // token
    int32_t count = 0;
  };
  struct Numbers {
    Place place;
    int32_t arrival[kMaxEntries] = {};  // of lane r: at rank r, -1 = none
    int32_t primary[kMaxEntries] = {};  // of lane r: slot there, -1 = no row was kept
  };

  [[nodiscard]] __device__ __forceinline__ Place locate(int ordinal) const {
    Place place;
    const int chunk = team_.index + ordinal * team_.count;
    if (chunk < num_device_chunks(num_tokens_)) {
      const int size = chunk_tokens(num_tokens_);
      place.ordinal = ordinal;
      place.chunk = chunk;
      place.first = chunk * size;
      place.count = min(size, num_tokens_ - place.first);
    }
    return place;
  }

  [[nodiscard]] __device__ __forceinline__ Numbers load(const Place& place) const {
    Numbers numbers;
    numbers.place = place;
    const int lane = lane_index();
#pragma unroll
    for (int entry = 0; entry < kMaxEntries; ++entry) {
      const int64_t pair = static_cast<int64_t>(place.first + entry) * me_.num_ranks + lane;
      const bool is_inside = entry < place.count && lane < me_.num_ranks;
      numbers.arrival[entry] = is_inside ? call_.plan.arrival()[pair] : -1;
      numbers.primary[entry] = is_inside ? call_.plan.primary()[pair] : -1;
    }
    return numbers;
  }

  [[nodiscard]] __device__ __forceinline__ SumItem resolve(const Numbers& numbers) const {
    SumItem item;
    item.ordinal = numbers.place.ordinal;
    item.chunk = numbers.place.chunk;
    item.count = numbers.place.count;
    const int lane = lane_index();
#pragma unroll
    for (int entry = 0; entry < kMaxEntries; ++entry) {
      // Ranks the token went to, and those of them where a row was kept.
      const uint32_t sent = __ballot_sync(kAllLanes, numbers.arrival[entry] >= 0);
      const uint32_t kept = __ballot_sync(kAllLanes, numbers.primary[entry] >= 0);
      const int token = numbers.place.first + entry;
      int place = 0;
      if (lane < __popc(kept)) {
        const uint32_t rank = __fns(kept, 0, lane + 1);
        place = __popc(sent & ((1U << rank) - 1U));
      }
      item.num_rows[entry] = __popc(kept);
      item.out_row[entry] = token;
      item.row[entry] = token * per_token_ + place;
      item.scale[entry] = 1;
    }
    return item;
  }

  [[nodiscard]] __device__ __forceinline__ bool wait(const SumItem& item) const {
    bool is_here = true;
    const int peer = lane_index();
    if (peer < me_.num_ranks) {
      const WaitSite site = {DeviceOp::kCombine, setup_.epoch, peer, WaitFor::kRows};
      is_here = wait_reached(me_, signal_from(item, peer), setup_.epoch, site);
    }
    __syncwarp();  // what each lane acquired is every lane's now
    const bool all = __all_sync(kAllLanes, is_here);
    ptx::fence_async_proxy();
    return all;
  }

  [[nodiscard]] __device__ __forceinline__ const std::byte* row(int32_t index) const {
    return call_.staged + static_cast<int64_t>(index) * call_.row_bytes;
  }
  [[nodiscard]] __device__ __forceinline__ std::byte* out(int, int32_t row) const {
    return call_.out + static_cast<int64_t>(row) * call_.row_bytes;
  }

  __device__ __forceinline__ void finish(int, int chunk, int count, uint32_t n) const {
    if (call_.out_weights == nullptr || static_cast<int>(n) % team_.warps != team_.warp) {
      return;
    }
    const int first = chunk * chunk_tokens(num_tokens_);
    for (int token = first; token < first + count; ++token) {
      return_weights(token);
    }
  }

 private:
  [[nodiscard]] __device__ __forceinline__ const uint32_t* signal_from(
      const SumItem& item, int peer
  ) const {
    return signal_of(
        me_,
        me_.rank,
        me_.map.signals().combine(static_cast<uint32_t>(peer), static_cast<uint32_t>(item.chunk))
    );
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
    const int num_warps = team_.count * team_.warps;
    const int warp = team_.index * team_.warps + team_.warp;
    for (int token = warp; token < num_tokens_; token += num_warps) {
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
      is_last = ptx::add_acq_rel_gpu(&me_.local->grid, 1) + 1 == static_cast<uint32_t>(num_warps)
                    ? 1U
                    : 0U;
    }
    __syncwarp();
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
  Team team_;
  int max_topk_;
  int num_tokens_;
  int per_token_;
};

}  // namespace weft
