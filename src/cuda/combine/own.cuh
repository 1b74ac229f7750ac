// SPDX-License-Identifier: Apache-2.0
// The one role of combine in a group of one rank: a team of warps takes a chunk of the tokens and
// adds each token's rows where the caller has them. There is nobody to send sums to, so that they
// go straight to the caller, with the bits of the two roles of reduce.cuh and sum.cuh: a sum of one
// partial sum is that partial sum. row_sum.cuh adds. Before: the caller's experts; after: the
// caller.
#pragma once

#include "cuda/combine/row_sum.cuh"
#include "cuda/combine/sum.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

template <bool kScaled>
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

  [[nodiscard]] __device__ __forceinline__ const ItemShape& shape() const { return shape_; }
  [[nodiscard]] __device__ __forceinline__ bool is_open() const { return true; }

  struct Place {
    int chunk = 0;
    int first = 0;  // token
  };
  struct Numbers {
    Place place;
    int32_t slot[kItemSteps];  // of the route of this lane's position, -1 = none
    float scale[kItemSteps] = {};
  };

  [[nodiscard]] __device__ __forceinline__ Place first() const { return place_of(team_.index); }
  [[nodiscard]] __device__ __forceinline__ Place after(const Place& before) const {
    return place_of(before.chunk + team_.count);
  }

  [[nodiscard]] __device__ __forceinline__ Numbers load(const Place& place) const {
    Numbers numbers;
    numbers.place = place;
    const int end = count_of(place) * shape_.width;
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      const int position = ItemShape::position(step);
      numbers.slot[step] = -1;
      if (shape_.has(step) && position < end) {
        const int token = place.first + shape_.entry[step];
        const int k = position - shape_.entry[step] * shape_.width;
        const int64_t route = static_cast<int64_t>(token) * max_topk_ + k;
        numbers.slot[step] = call_.plan.route_slot()[route];
        if constexpr (kScaled) {
          numbers.scale[step] = scale_of(route, token, k);
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
    item.count = count_of(place);
    item.out_row = place.first + lane_index();
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      if (shape_.has(step)) {
        item.used[step] = __ballot_sync(kAllLanes, numbers.slot[step] >= 0);
        item.row[step] = numbers.slot[step];
        item.scale[step] = numbers.scale[step];
      }
    }
    return item;
  }

  // There is nothing to wait for: the rows are this rank's own.
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
    const int first = chunk * chunk_tokens_;
    for (int token = first; token < first + count; ++token) {
      return_token_weights(call_, token, [&](int64_t route, int /*k*/) {
        return call_.row_weights[call_.plan.route_slot()[route]];
      });
    }
  }

 private:
  // The factor of a route: the plan holds it, or the caller gives it for this call.
  [[nodiscard]] __device__ __forceinline__ float scale_of(int64_t route, int token, int k) const {
    if (call_.scale == CombineScale::kPlanWeights) {
      return call_.plan.route_weight()[route];
    }
    const int64_t at = static_cast<int64_t>(token) * call_.topk + k;
    if (call_.source_idx != nullptr &&
        given_expert(call_.source_idx, call_.index_bytes, static_cast<size_t>(at)) < 0) {
      return 0.0F;
    }
    if (!call_.from_map) {
      return call_.source_weights[at];
    }
    const int32_t expert = call_.plan.route_expert()[route];
    const int64_t begin = static_cast<int64_t>(token) * call_.me.map.num_experts;
    return expert < 0 ? 0.0F : call_.source_weights[begin + expert];
  }

  [[nodiscard]] __device__ __forceinline__ Place place_of(int chunk) const {
    return {chunk, chunk * chunk_tokens_};
  }
  // Tokens of an item; not positive behind the last.
  [[nodiscard]] __device__ __forceinline__ int count_of(const Place& place) const {
    return min(chunk_tokens_, num_tokens_ - place.first);
  }

  const CombineLaunch& call_;
  Team team_;
  ItemShape shape_;
  int num_tokens_;
  int chunk_tokens_;
  int max_topk_;
};

}  // namespace weft
