// SPDX-License-Identifier: Apache-2.0
// The pre-reduce role of combine: a team of warps takes the arrivals that one chunk of one rank's
// tokens made on this rank, sums the rows of each arrival and stores one row per arrival in that
// rank's staging, together with weight gradients; then it raises one signal. row_sum.cuh adds.
// Before: the caller's experts; after: the sum role of the tokens' rank (sum.cuh).
#pragma once

#include "cuda/combine/row_sum.cuh"
#include "cuda/device/tagged.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// With `kCopied` the call goes by copy engines (copy_engines/combine.cu): sums and weights are
// packed by arrival in this rank's memory instead.
template <bool kScaled, bool kCopied, class Shape = ItemShape>
class CombineReduce {
 public:
  static constexpr bool kScales = kScaled;
  static constexpr bool kStoresEmpty = false;  // a dropped arrival has no row

  __device__ CombineReduce(
      const CombineLaunch& call, const CallSetup& setup, TeamProgress& progress, const Team& team
  )
      : call_(call),
        setup_(setup),
        me_(call.me),
        progress_(progress),
        team_(team),
        shape_(static_cast<int>(call.plan.map.max_topk)) {
    max_topk_ = static_cast<int>(call.plan.map.max_topk);
    num_sources_ = kCopied || !reads_own_rows(call) ? me_.num_ranks : me_.num_ranks - 1;
    num_items_ = num_sources_ == 0 ? 0 : num_items(me_, setup, num_sources_);
    const int sources = max(num_sources_, 1);
    step_chunks_ = team.count / sources;
    step_sources_ = team.count % sources;
  }

  [[nodiscard]] __device__ __forceinline__ const Shape& shape() const { return shape_; }

  // Waits, for all ranks at once, for weights that the tokens' ranks send, unless each comes as a
  // word of its own. Returns false if the call is given up.
  [[nodiscard]] __device__ bool is_open() const {
    if (kCopied || !call_.has_source_weights || call_.is_eager) {
      return true;
    }
    bool is_here = true;
    const int source = lane_index();
    if (source < me_.num_ranks) {
      const WaitSite site = {Op::kCombine, setup_.epoch, source, WaitFor::kSourceWeights};
      const auto slot = me_.map.signals().source_weights(static_cast<uint32_t>(source));
      is_here = wait_reached(me_, signal_of(me_, me_.rank, slot), setup_.epoch, site);
    }
    __syncwarp();  // what each lane acquired is every lane's now
    return __all_sync(kAllLanes, is_here);
  }

  struct Place {
    int index = 0;   // among the items of all teams
    int offset = 0;  // of the source behind this rank
    int chunk = 0;
    int source = 0;
    ChunkArrivals arrivals = {0, 0};  // none where the source has fewer chunks than others
  };
  struct Numbers {
    Place place;
    ArrivalHead head = {};  // of lane i: of the i-th arrival
    int32_t row[kItemSteps] = {};
    uint64_t scale[kItemSteps] = {};  // with the call's epoch, as tagged.cuh has them
  };

  // Return the places of the team's items, one after the other.
  [[nodiscard]] __device__ __forceinline__ Place first() const {
    Place place;
    place.index = team_.index;
    place.chunk = team_.index / max(num_sources_, 1);
    place.offset = team_.index % max(num_sources_, 1);
    find(place);
    return place;
  }
  [[nodiscard]] __device__ __forceinline__ Place after(const Place& before) const {
    Place place;
    place.index = before.index + team_.count;
    place.chunk = before.chunk + step_chunks_;
    place.offset = before.offset + step_sources_;
    if (place.offset >= num_sources_) {
      place.offset -= num_sources_;
      ++place.chunk;
    }
    find(place);
    return place;
  }

  [[nodiscard]] __device__ __forceinline__ bool is_there(const Place& place) const {
    return place.index < num_items_;
  }

  [[nodiscard]] __device__ __forceinline__ Numbers load(const Place& place) const {
    Numbers numbers;
    numbers.place = place;
    const int count = place.arrivals.end - place.arrivals.begin;
    const int lane = lane_index();
    if (lane < count) {
      numbers.head =
          call_.plan.heads(static_cast<uint32_t>(place.source))[place.arrivals.begin + lane];
    }
    const int64_t begin = static_cast<int64_t>(place.arrivals.begin) * max_topk_;
    const int end = count * max_topk_;
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      const int position = Shape::position(step);
      if (shape_.has(step) && position < end) {
        numbers.row[step] = call_.plan.slots(static_cast<uint32_t>(place.source))[begin + position];
        if constexpr (kScaled) {
          numbers.scale[step] = scale_of_route(place.source, begin + position);
        }
      }
    }
    return numbers;
  }

  [[nodiscard]] __device__ __forceinline__ SumItem resolve(const Numbers& numbers) const {
    const Place& place = numbers.place;
    SumItem item;
    item.is_there = place.index < num_items_;
    item.source = place.source;
    item.chunk = place.chunk;
    item.count = place.arrivals.end - place.arrivals.begin;
    item.out_row = kCopied ? place.arrivals.begin + lane_index() : numbers.head.return_row;
    const int routes = call_.one_row ? min(numbers.head.num_routes, 1) : numbers.head.num_routes;
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      if (shape_.has(step)) {
        const int entry = shape_.entry[step];
        const int kept = __shfl_sync(kAllLanes, routes, entry);
        const bool is_used = entry < item.count && Shape::position(step) - entry * max_topk_ < kept;
        item.used[step] = __ballot_sync(kAllLanes, is_used);
        item.row[step] = numbers.row[step];
        if constexpr (kScaled) {
          uint64_t scale = numbers.scale[step];
          if (is_used && !is_of_call(scale, setup_.epoch)) {
            scale = await_scale(place, Shape::position(step));
          }
          item.scale[step] = __uint_as_float(static_cast<uint32_t>(scale));
          const bool is_here = !is_used || is_of_call(scale, setup_.epoch);
          item.is_there = __all_sync(kAllLanes, is_here) && item.is_there;
        }
      }
    }
    return item;
  }

  // Waits for nothing: the rows are this rank's own.
  [[nodiscard]] __device__ __forceinline__ bool wait(const SumItem&) const {
    return true;
  }

  [[nodiscard]] __device__ __forceinline__ const std::byte* row(int32_t index) const {
    return call_.rows + static_cast<int64_t>(index) * call_.payload.row_bytes;
  }
  [[nodiscard]] __device__ __forceinline__ std::byte* out(int source, int32_t row) const {
    return setup_.rows[source] + static_cast<int64_t>(row) * call_.payload.row_bytes;
  }

  // Reports that this warp's part of the team's n-th item is stored; returns weights.
  __device__ __forceinline__ void finish(int source, int chunk, int count, uint32_t n) {
    if (call_.row_weights != nullptr && count > 0 &&
        static_cast<int>(n) % team_.warps == team_.warp) {
      return_weights(source, chunk);
    }
    report_progress(progress_, team_, n + 1);
  }

  // Raises, by the block's last warp, its teams' signals: lane 0 tells the tokens' rank.
  __device__ void run_signals(int num_teams) const {
    const int block = static_cast<int>(blockIdx.x);
    const auto first = [&](int in_block) { return team_index(block, call_.num_reduce, in_block); };
    const auto items_of = [&](int in_block) -> uint32_t {
      return static_cast<uint32_t>(count_from(first(in_block), team_.count, num_items_));
    };
    signal_chunks(me_, progress_, num_teams, team_.warps, items_of, [&](int in_block, int n) {
      const ChunkItem place = item_at(me_, num_sources_, first(in_block) + n * team_.count);
      const bool is_there = place.chunk < num_device_chunks(setup_.tokens[place.source]);
      if (lane_index() == 0 && is_there) {
        const auto slot = me_.map.signals().combine(me_.rank, place.chunk);
        ptx::store_relaxed_sys(setup_.signals[place.source] + slot, setup_.epoch);
      }
    });
  }

 private:
  __device__ __forceinline__ void find(Place& place) const {
    place.source = me_.rank + 1 + place.offset;
    place.source -= place.source >= me_.num_ranks ? me_.num_ranks : 0;
    if (place.index < num_items_ && place.chunk < num_device_chunks(setup_.tokens[place.source])) {
      place.arrivals = arrivals_of(call_.plan, place.source, place.chunk);
    }
  }

  // Returns the factor of a source's route `at`: from the plan, or as the token's rank has sent it,
  // if it has come, for this call.
  [[nodiscard]] __device__ __forceinline__ uint64_t scale_of_route(int source, int64_t at) const {
    const auto from = static_cast<uint32_t>(source);
    if (call_.scale == CombineScale::kPlanWeights) {
      return tagged(setup_.epoch, __float_as_uint(call_.plan.weights(from)[at]));
    }
    if (call_.is_eager) {
      return ptx::load_relaxed_sys(weight_word(source, at));
    }
    const int64_t arrival = at / max_topk_;
    const int32_t k = call_.plan.origins(from)[at] & 0xff;
    const auto* weights = reinterpret_cast<const volatile float*>(
        control_of(me_, me_.rank) + me_.map.weights_offset(from)
    );
    const float weight = k < max_topk_ ? weights[arrival * max_topk_ + k] : 0.0F;
    return tagged(setup_.epoch, __float_as_uint(weight));
  }

  [[nodiscard]] __device__ __forceinline__ const uint64_t* weight_word(int source, int64_t at)
      const {
    const auto from = static_cast<uint32_t>(source);
    const int32_t token = call_.plan.heads(from)[at / max_topk_].token;
    const int32_t k = min(call_.plan.origins(from)[at] & 0xff, max_topk_ - 1);
    return routing_of(me_, me_.rank, setup_.epoch, source) + me_.map.routing().weights() +
           token * max_topk_ + k;
  }

  // Waits for the factor of a position of an item and returns it; if the call is given up, its tag
  // is not this call's.
  [[nodiscard]] __device__ __noinline__ uint64_t
  await_scale(const Place& place, int position) const {
    const WaitSite site = {Op::kCombine, setup_.epoch, place.source, WaitFor::kSourceWeights};
    const int64_t at = int64_t{place.arrivals.begin} * max_topk_ + position;
    return await_tagged(me_, weight_word(place.source, at), site);
  }

  [[nodiscard]] __device__ __forceinline__ float* returned_to(int source) const {
    if constexpr (kCopied) {
      return setup_.weights[source];
    } else {
      return reinterpret_cast<float*>(
          control_of(me_, source) + me_.map.returned_offset(setup_.epoch, call_.is_eager)
      );
    }
  }

  // Returns weight gradients. Each lane loads all it needs for a route of its own at the same time:
  // arrival by arrival, this would take the warp longer than adding the rows.
  __device__ __forceinline__ void return_weights(int source, int chunk) const {
    const auto from = static_cast<uint32_t>(source);
    const ChunkArrivals arrivals = arrivals_of(call_.plan, source, chunk);
    float* returned = returned_to(source);
    const int64_t begin = static_cast<int64_t>(arrivals.begin) * max_topk_;
    const int num_positions = (arrivals.end - arrivals.begin) * max_topk_;
    for (int position = lane_index(); position < num_positions; position += kWarpLanes) {
      const int entry = position / max_topk_;
      const int arrival = arrivals.begin + entry;
      const ArrivalHead head = call_.plan.heads(from)[arrival];
      const int64_t slot = call_.plan.slots(from)[begin + position];
      const int32_t k = call_.plan.origins(from)[begin + position] & 0xff;
      if (position - entry * max_topk_ < head.num_routes) {
        const int64_t place = call_.one_row ? slot * call_.topk + k : slot;
        const int64_t to = kCopied ? arrival : head.token;
        returned[to * max_topk_ + k] = call_.row_weights[place];
      }
    }
  }

  const CombineLaunch& call_;
  const CallSetup& setup_;
  const RankView& me_;
  TeamProgress& progress_;
  Team team_;
  Shape shape_;
  int max_topk_;
  int num_sources_;  // this rank is the last, or none
  int num_items_;
  int step_chunks_;
  int step_sources_;
};

}  // namespace weft
