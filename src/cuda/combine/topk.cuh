// SPDX-License-Identifier: Apache-2.0
// The two roles of combine with SumOrder::kTopk in a group of several ranks. Teams of the first
// copy the row of each route to the staging of the token's rank, to the place of its token and
// choice, unless that is this rank; teams of the second wait for a chunk of tokens and add what
// lies there and this rank's own rows, choice by choice. own.cuh has one rank. Items, signals and
// weight gradients are those of the other order's roles (reduce.cuh, sum.cuh).
#pragma once

#include "cuda/combine/reduce.cuh"
#include "cuda/combine/row_sum.cuh"
#include "cuda/combine/sum.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

class TopkReturn {
 public:
  __device__ TopkReturn(
      const CombineLaunch& call, const CallSetup& setup, TeamProgress& progress, const Team& team
  )
      : call_(call), setup_(setup), items_(call, setup, progress, team) {}

  // Copies, by one warp, its slice of all of the team's rows.
  __device__ void run(const Slice& slice) {
    uint32_t finished = 0;
    for (auto at = items_.first(); items_.is_there(at); at = items_.after(at)) {
      for (int arrival = at.arrivals.begin; arrival < at.arrivals.end; ++arrival) {
        copy_arrival(static_cast<uint32_t>(at.source), arrival, slice);
      }
      items_.finish(at.source, at.chunk, at.arrivals.end - at.arrivals.begin, finished++);
    }
  }

  // Called by the block's last warp.
  __device__ void run_signals(int num_teams) const { items_.run_signals(num_teams); }

 private:
  // Copies an arrival's rows; lane j has route j.
  __device__ __forceinline__ void copy_arrival(uint32_t source, int arrival, const Slice& slice)
      const {
    const ArrivalHead head = call_.plan.heads(source)[arrival];
    const int64_t begin = static_cast<int64_t>(arrival) * call_.plan.map.max_topk;
    int32_t slot = 0;
    int32_t place = 0;
    if (lane_index() < head.num_routes) {
      slot = call_.plan.slots(source)[begin + lane_index()];
      place = head.token * call_.topk + (call_.plan.origins(source)[begin + lane_index()] & 0xff);
    }
    for (int route = 0; route < head.num_routes; ++route) {
      const int64_t from = __shfl_sync(kAllLanes, slot, route);
      const int64_t to = __shfl_sync(kAllLanes, place, route);
      copy_slice(
          setup_.rows[source] + to * call_.payload.row_bytes,
          call_.rows + from * call_.payload.row_bytes,
          slice
      );
    }
  }

  static __device__ __forceinline__ void copy_slice(
      std::byte* out, const std::byte* row, const Slice& slice
  ) {
    for (int piece = 0; piece < slice.pieces.count; ++piece) {
      const int32_t begin = slice.offset + piece * slice.pieces.each;
      const int32_t bytes = slice.pieces.bytes(piece);
      uint4 bits[kSumVectors];
#pragma unroll
      for (int i = 0; i < kSumVectors; ++i) {
        const int at = (i * kWarpLanes + lane_index()) * 16;
        bits[i] = at < bytes ? ptx::load_16(row + begin + at) : uint4{0, 0, 0, 0};
      }
#pragma unroll
      for (int i = 0; i < kSumVectors; ++i) {
        const int at = (i * kWarpLanes + lane_index()) * 16;
        if (at < bytes) {
          ptx::store_16(out + begin + at, bits[i]);
        }
      }
    }
  }

  const CombineLaunch& call_;
  const CallSetup& setup_;
  CombineReduce<false, false> items_;
};

// A source of sum_rows_vector(). Rows are multiplied here, so that each product is rounded once.
template <bool kScaled>
class TopkSum {
 public:
  static constexpr bool kScales = kScaled;
  static constexpr bool kStoresEmpty = true;  // a token without routes gets zeros

  __device__ TopkSum(const CombineLaunch& call, const CallSetup& setup, const Team& team)
      : call_(call),
        tokens_(call, setup, team),
        shape_(call.topk),
        num_tokens_(call.plan.header()->num_tokens) {}

  [[nodiscard]] __device__ __forceinline__ const ItemShape& shape() const { return shape_; }

  using Place = CombineSum<false>::Place;
  struct Numbers {
    Place place;
    int32_t slot[kItemSteps];  // of the choice of this lane's position, -1 = none
    int32_t expert[kItemSteps];
    float scale[kItemSteps];
  };

  [[nodiscard]] __device__ __forceinline__ Place first() const { return tokens_.first(); }
  [[nodiscard]] __device__ __forceinline__ Place after(const Place& before) const {
    return tokens_.after(before);
  }

  [[nodiscard]] __device__ __forceinline__ Numbers load(const Place& place) const {
    Numbers numbers;
    numbers.place = place;
    const int end = tokens_.count_of(place) * call_.topk;
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      const int position = ItemShape::position(step);
      numbers.slot[step] = -1;
      numbers.scale[step] = 1;
      if (shape_.has(step) && position < end) {
        const int64_t token = place.first + shape_.entry[step];
        const int k = position - shape_.entry[step] * call_.topk;
        const int64_t route = token * call_.plan.map.max_topk + k;
        numbers.slot[step] = call_.plan.route_slot()[route];
        numbers.expert[step] = call_.plan.route_expert()[route];
        if (kScaled) {
          numbers.scale[step] = scale_of(token, k);
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
    item.count = tokens_.count_of(place);
    item.out_row = place.first + lane_index();
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      if (shape_.has(step)) {
        item.used[step] = __ballot_sync(kAllLanes, numbers.slot[step] >= 0);
        item.row[step] = place.first * call_.topk + ItemShape::position(step);
        if (numbers.slot[step] >= 0 && is_own(numbers.expert[step])) {
          item.row[step] = ~numbers.slot[step];
        }
        item.scale[step] = numbers.scale[step];
      }
    }
    return item;
  }

  [[nodiscard]] __device__ __forceinline__ bool wait(const SumItem& item) const {
    return tokens_.wait(item);
  }
  [[nodiscard]] __device__ __forceinline__ const std::byte* row(int32_t index) const {
    const std::byte* rows = index < 0 ? call_.rows : call_.staged;
    return rows + static_cast<int64_t>(index < 0 ? ~index : index) * call_.payload.row_bytes;
  }
  [[nodiscard]] __device__ __forceinline__ std::byte* out(int source, int32_t row) const {
    return tokens_.out(source, row);
  }
  __device__ __forceinline__ void finish(int source, int chunk, int count, uint32_t n) const {
    tokens_.finish(source, chunk, count, n);
  }

 private:
  [[nodiscard]] __device__ __forceinline__ bool is_own(int32_t expert) const {
    const uint32_t rank =
        call_.plan.map.experts_per_rank.divide(static_cast<uint32_t>(max(expert, 0)));
    return rank == static_cast<uint32_t>(call_.me.rank);
  }

  // Returns a choice's factor; reports a choice that the plan does not have.
  [[nodiscard]] __device__ __forceinline__ float scale_of(int64_t token, int k) const {
    return call_.scale == CombineScale::kPlanWeights
               ? call_.plan.route_weight()[token * call_.plan.map.max_topk + k]
               : source_weight_of(call_, token, k);
  }

  const CombineLaunch& call_;
  CombineSum<false> tokens_;
  ItemShape shape_;
  int num_tokens_;
};

}  // namespace weft
