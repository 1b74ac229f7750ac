// SPDX-License-Identifier: Apache-2.0
// The one role of combine in a group of one rank: a team of warps takes a chunk of the tokens and
// adds each token's rows where the caller has them. As no other rank gets them, sums go straight to
// the caller, with the bits of the two roles of reduce.cuh and sum.cuh: a sum of one partial sum is
// that partial sum. row_sum.cuh adds. Before: the caller's experts; after: the caller. With
// SumOrder::kTopk rows are added in the order of the token's choices.
#pragma once

#include "cuda/combine/row_sum.cuh"
#include "cuda/combine/sum.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

template <bool kScaled, bool kByChoice, class Shape = ItemShape>
class CombineOwn {
 public:
  static constexpr bool kScales = kScaled;
  static constexpr bool kStoresEmpty = true;  // a token without routes gets zeros

  __device__ CombineOwn(const CombineLaunch& call, const Team& team)
      : call_(call), team_(team), shape_(max(call.topk, 1)) {
    num_tokens_ = call.plan.header()->num_tokens;
    chunk_tokens_ = chunk_tokens(num_tokens_);
    max_topk_ = static_cast<int>(call.plan.map.max_topk);
  }

  [[nodiscard]] __device__ __forceinline__ const Shape& shape() const { return shape_; }
  [[nodiscard]] __device__ __forceinline__ bool is_open() const { return true; }

  // Place of the numbers of this lane's positions: those of a token's arrival, whose routes are in
  // the order of ranks and experts, or of the token itself, whose choices may be none.
  struct Place {
    int chunk = 0;
    int first = 0;                   // token
    int32_t entry[kItemSteps] = {};  // arrival or token, -1 = none
  };
  struct Numbers {
    Place place;
    bool is_used[kItemSteps] = {};
    int32_t slot[kItemSteps] = {};
    float scale[kItemSteps] = {};
  };

  [[nodiscard]] __device__ __forceinline__ Place first() const { return place_of(team_.index); }
  [[nodiscard]] __device__ __forceinline__ Place after(const Place& before) const {
    return place_of(before.chunk + team_.count);
  }

  [[nodiscard]] __device__ __forceinline__ Numbers load(const Place& place) const {
    Numbers numbers;
    numbers.place = place;
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      const int32_t entry = place.entry[step];
      if (shape_.has(step) && entry >= 0) {
        const int64_t at = static_cast<int64_t>(entry) * max_topk_ + in_entry(step);
        if constexpr (kByChoice) {
          numbers.slot[step] = call_.plan.route_slot()[at];
          numbers.is_used[step] = numbers.slot[step] >= 0;
        } else {
          numbers.slot[step] = call_.plan.slots(0)[at];
          numbers.is_used[step] = in_entry(step) < call_.plan.heads(0)[entry].num_routes;
        }
        if constexpr (kScaled) {
          numbers.scale[step] = scale_of(at, place.first + shape_.entry[step], in_entry(step));
        }
      }
    }
    return numbers;
  }

  [[nodiscard]] __device__ __forceinline__ SumItem resolve(const Numbers& numbers) const {
    const Place& place = numbers.place;
    SumItem item;
    item.is_there = place.first < num_tokens_;
    item.chunk = place.chunk;
    item.count = count_of(place.first);
    item.out_row = place.first + lane_index();
    uint32_t unused = 0;  // positions, where tokens have fewer routes than choices
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      if (shape_.has(step)) {
        item.used[step] = __ballot_sync(kAllLanes, numbers.is_used[step]);
        item.row[step] = numbers.slot[step];
        item.scale[step] = numbers.scale[step];
        unused |= __ballot_sync(kAllLanes, is_choice(place, step)) & ~item.used[step];
      }
    }
    if (kScaled && !kByChoice && call_.source_idx != nullptr && unused != 0) [[unlikely]] {
      check_choices(place.first);
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
  [[nodiscard]] __device__ __forceinline__ std::byte* out(int, int32_t row) const {
    return call_.out + static_cast<int64_t>(row) * call_.payload.row_bytes;
  }

  __device__ __forceinline__ void finish(int, int chunk, int count, uint32_t n) const {
    if (call_.out_weights == nullptr || static_cast<int>(n) % team_.warps != team_.warp) {
      return;
    }
    return_token_weights(
        call_,
        chunk * chunk_tokens_,
        count,
        [&](int64_t route, int /*token*/, int /*k*/) {
          return call_.row_weights[call_.plan.route_slot()[route]];
        }
    );
  }

 private:
  [[nodiscard]] __device__ __forceinline__ bool is_choice(const Place& place, int step) const {
    return shape_.entry[step] < count_of(place.first) && in_entry(step) < call_.topk;
  }

  // Reports choices that the caller names where the plan has none, and so no row.
  __device__ __forceinline__ void check_choices(int first) const {
    const int count = count_of(first) * call_.topk;
#pragma unroll 1
    for (int i = lane_index(); i < count; i += kWarpLanes) {
      const int token = i / call_.topk;
      static_cast<void>(counted_weight(call_, first + token, i - token * call_.topk, 0.0F));
    }
  }

  // Returns the lane's position within its entry.
  [[nodiscard]] __device__ __forceinline__ int in_entry(int step) const {
    return Shape::position(step) - shape_.entry[step] * shape_.width;
  }

  // Returns the factor of a token's route `at`, in `position`: from the plan, or from the caller
  // for this call.
  [[nodiscard]] __device__ __forceinline__ float scale_of(int64_t at, int token, int position)
      const {
    if (call_.scale == CombineScale::kPlanWeights) {
      return kByChoice ? call_.plan.route_weight()[at] : call_.plan.weights(0)[at];
    }
    const int32_t k = kByChoice ? position : call_.plan.origins(0)[at] & 0xff;
    return k < call_.topk ? source_weight_of(call_, token, k) : 0.0F;  // else of no route
  }

  [[nodiscard]] __device__ __forceinline__ Place place_of(int chunk) const {
    Place place = {chunk, chunk * chunk_tokens_};
    const int end = count_of(place.first) * shape_.width;
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      const bool is_inside = shape_.has(step) && Shape::position(step) < end;
      const int token = place.first + shape_.entry[step];
      place.entry[step] = !is_inside ? -1 : kByChoice ? token : call_.plan.arrival()[token];
    }
    return place;
  }
  // Returns the tokens of an item that begins at `first`; not positive behind the last.
  [[nodiscard]] __device__ __forceinline__ int count_of(int first) const {
    return min(chunk_tokens_, num_tokens_ - first);
  }

  const CombineLaunch& call_;
  Team team_;
  Shape shape_;
  int num_tokens_;
  int chunk_tokens_;
  int max_topk_;
};

}  // namespace weft
