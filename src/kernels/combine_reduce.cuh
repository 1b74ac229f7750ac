// SPDX-License-Identifier: Apache-2.0
// The pre-reduce role of combine: a team of warps takes the arrivals that one chunk of one rank's
// tokens made here, sums the rows of each and stores one row per arrival in that rank's staging,
// weight gradients with it; then one signal.
#pragma once

#include "kernels/launch.hpp"
#include "kernels/row_sum.cuh"

namespace weft {

template <bool kScaled>
class CombineReduce {
 public:
  static constexpr bool kScales = kScaled;
  static constexpr bool kStoresEmpty = false;  // a dropped arrival has no row

  __device__ CombineReduce(
      const CombineLaunch& call, const CallSetup& setup, TeamProgress& progress, const Team& team
  )
      : call_(call), setup_(setup), me_(call.me), progress_(progress), team_(team) {
    max_topk_ = static_cast<int>(call.plan.map.max_topk);
    num_items_ = num_items(me_, setup, me_.num_ranks);
  }

  // Weights that the tokens' ranks hand in, of every rank at once. False if the call is given up.
  [[nodiscard]] __device__ bool is_open() const {
    if (!call_.has_source_weights) {
      return true;
    }
    bool is_here = true;
    const int source = lane_index();
    if (source < me_.num_ranks) {
      const WaitSite site = {DeviceOp::kCombine, setup_.epoch, source, WaitFor::kSourceWeights};
      const auto slot = me_.map.signals().source_weights(static_cast<uint32_t>(source));
      is_here = wait_reached(me_, signal_of(me_, me_.rank, slot), setup_.epoch, site);
    }
    __syncwarp();  // what each lane acquired is every lane's now
    return __all_sync(kAllLanes, is_here);
  }

  struct Place {
    int32_t ordinal = -1;
    int32_t source = 0;
    int32_t chunk = 0;
    ChunkArrivals arrivals = {0, 0};
  };
  struct Numbers {
    Place place;
    ArrivalHead head = {};  // of lane i: of the i-th arrival
    int32_t row[kMaxEntries] = {};
    float scale[kMaxEntries] = {};
  };

  // The ordinal-th item of this team; an empty one where the source has fewer chunks than others.
  [[nodiscard]] __device__ __forceinline__ Place locate(int ordinal) const {
    Place place;
    const int index = team_.index + ordinal * team_.count;
    if (index >= num_items_) {
      return place;
    }
    const ChunkItem item = item_at(me_, me_.num_ranks, index);
    place.ordinal = ordinal;
    place.source = item.source;
    place.chunk = item.chunk;
    if (is_chunk(item)) {
      place.arrivals = arrivals_of(call_.plan, item.source, item.chunk);
    }
    return place;
  }

  [[nodiscard]] __device__ __forceinline__ Numbers load(const Place& place) const {
    Numbers numbers;
    numbers.place = place;
    const auto from = static_cast<uint32_t>(place.source);
    const int count = place.arrivals.end - place.arrivals.begin;
    const int lane = lane_index();
    if (lane < count) {
      numbers.head = call_.plan.heads(from)[place.arrivals.begin + lane];
    }
#pragma unroll
    for (int entry = 0; entry < kMaxEntries; ++entry) {
      const int64_t at = static_cast<int64_t>(place.arrivals.begin + entry) * max_topk_ + lane;
      const bool is_inside = entry < count && lane < call_.topk;
      numbers.row[entry] = is_inside ? call_.plan.slots(from)[at] : 0;
      numbers.scale[entry] = kScaled && is_inside ? scale_of_route(from, at) : 1.0F;
    }
    return numbers;
  }

  [[nodiscard]] __device__ __forceinline__ SumItem resolve(const Numbers& numbers) const {
    SumItem item;
    item.ordinal = numbers.place.ordinal;
    item.source = numbers.place.source;
    item.chunk = numbers.place.chunk;
    item.count = numbers.place.arrivals.end - numbers.place.arrivals.begin;
#pragma unroll
    for (int entry = 0; entry < kMaxEntries; ++entry) {
      const int routes = __shfl_sync(kAllLanes, numbers.head.num_routes, entry);
      item.num_rows[entry] = call_.one_row ? min(routes, 1) : routes;
      item.out_row[entry] = __shfl_sync(kAllLanes, numbers.head.return_row, entry);
      item.row[entry] = numbers.row[entry];
      item.scale[entry] = numbers.scale[entry];
    }
    return item;
  }

  // Nothing to wait for: the rows are this rank's own.
  [[nodiscard]] __device__ __forceinline__ bool is_ready(const SumItem&) const {
    return true;
  }
  [[nodiscard]] __device__ __forceinline__ bool wait(const SumItem&) const {
    return true;
  }

  [[nodiscard]] __device__ __forceinline__ const std::byte* row(int32_t index) const {
    return call_.rows + static_cast<int64_t>(index) * call_.row_bytes;
  }
  [[nodiscard]] __device__ __forceinline__ std::byte* out(int source, int32_t row) const {
    return setup_.rows[source] + static_cast<int64_t>(row) * call_.row_bytes;
  }

  // This warp's part of the team's n-th item is stored.
  __device__ __forceinline__ void finish(int source, int chunk, int count, uint32_t n) {
    if (call_.row_weights != nullptr && count > 0 &&
        static_cast<int>(n) % team_.warps == team_.warp) {
      return_weights(source, chunk);
    }
    report_progress(progress_, team_, n + 1);
  }

  // The block's last warp: lane 0 tells the tokens' rank.
  __device__ void run_signals() const {
    const int block = static_cast<int>(blockIdx.x);
    const auto first = [&](int in_block) { return team_index(block, call_.num_reduce, in_block); };
    const auto items_of = [&](int in_block) -> uint32_t {
      return static_cast<uint32_t>(count_from(first(in_block), team_.count, num_items_));
    };
    signal_chunks(me_, progress_, team_.warps, items_of, [&](int in_block, int n) {
      const ChunkItem place = item_at(me_, me_.num_ranks, first(in_block) + n * team_.count);
      if (lane_index() == 0 && is_chunk(place)) {
        const auto slot = me_.map.signals().combine(
            static_cast<uint32_t>(me_.rank), static_cast<uint32_t>(place.chunk)
        );
        ptx::store_relaxed_sys(setup_.signals[place.source] + slot, setup_.epoch);
      }
    });
  }

 private:
  // Of route `at` of a source: held by the plan, or sent by the token's rank for this call.
  [[nodiscard]] __device__ __forceinline__ float scale_of_route(uint32_t source, int64_t at) const {
    if (call_.scale == CombineScale::kPlanWeights) {
      return call_.plan.weights(source)[at];
    }
    const int64_t arrival = at / max_topk_;
    const int32_t k = call_.plan.origins(source)[at] & 0xff;
    const auto* weights = reinterpret_cast<const volatile float*>(
        control_of(me_, me_.rank) + me_.map.weights_offset(source)
    );
    return k < max_topk_ ? weights[arrival * max_topk_ + k] : 0.0F;
  }

  // Lane j has route j of each entry.
  __device__ __forceinline__ void return_weights(int source, int chunk) const {
    const auto from = static_cast<uint32_t>(source);
    const ChunkArrivals arrivals = arrivals_of(call_.plan, source, chunk);
    auto* returned = reinterpret_cast<float*>(control_of(me_, source) + me_.map.returned_offset());
    for (int arrival = arrivals.begin; arrival < arrivals.end; ++arrival) {
      const ArrivalHead head = call_.plan.heads(from)[arrival];
      const int lane = lane_index();
      if (lane < head.num_routes) {
        const int64_t at = static_cast<int64_t>(arrival) * max_topk_ + lane;
        const int64_t slot = call_.plan.slots(from)[at];
        const int32_t k = call_.plan.origins(from)[at] & 0xff;
        const int64_t place = call_.one_row ? slot * call_.topk + k : slot;
        returned[static_cast<int64_t>(head.token) * max_topk_ + k] = call_.row_weights[place];
      }
    }
  }

  [[nodiscard]] __device__ __forceinline__ bool is_chunk(const ChunkItem& place) const {
    return place.chunk < num_device_chunks(setup_.tokens[place.source]);
  }

  const CombineLaunch& call_;
  const CallSetup& setup_;
  const RankView& me_;
  TeamProgress& progress_;
  Team team_;
  int max_topk_;
  int num_items_;
};

}  // namespace weft
