// SPDX-License-Identifier: Apache-2.0
// The sum role of combine: a team of warps takes a chunk of this rank's tokens, waits until every
// rank has returned its arrivals, and adds each token's arrivals in ascending rank order. If
// weights of this side scale the call, the team first sends them to the experts' ranks. row_sum.cuh
// adds. Before: the pre-reduce role of the experts' ranks (reduce.cuh); after: the caller.
#pragma once

#include "cuda/combine/choice.cuh"
#include "cuda/combine/row_sum.cuh"
#include "cuda/device/tagged.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// One warp hands the weights of the routes of `count` tokens to the caller, by k, or for a map by
// expert: 0 where no row was kept. weight_of(place of the route in the plan, token, k) is called
// where a row was kept. Each lane has routes of its own.
template <class WeightOf>
__device__ __forceinline__ void return_token_weights(
    const CombineLaunch& call, int first, int count, const WeightOf& weight_of
) {
  const int64_t width = call.from_map ? call.me.map.num_experts : call.topk;
  float* out = call.out_weights + first * width;
  if (call.from_map) {
    for (int64_t i = lane_index(); i < count * width; i += kWarpLanes) {
      out[i] = 0;
    }
    __syncwarp();
  }
  for (int position = lane_index(); position < count * call.topk; position += kWarpLanes) {
    const int in_chunk = position / call.topk;
    const int k = position - in_chunk * call.topk;
    const int token = first + in_chunk;
    const int64_t route = static_cast<int64_t>(token) * call.plan.map.max_topk + k;
    const bool is_kept = call.plan.route_slot()[route] >= 0;
    const float weight = is_kept ? weight_of(route, token, k) : 0.0F;
    if (!call.from_map) {
      out[position] = weight;
    } else if (is_kept) {
      out[in_chunk * width + call.plan.chosen_expert(call.plan.route_expert()[route])] = weight;
    }
  }
}

// Returns the weight that the caller gives the row of choice k of a token for this call; 0 for a
// choice left out or without a route. k is below the call's topk.
__device__ __forceinline__ float source_weight_of(const CombineLaunch& call, int64_t token, int k) {
  if (!call.from_map) {
    return counted_weight(call, token, k, call.source_weights[token * call.topk + k]);
  }
  const int32_t expert = call.plan.route_expert()[token * call.plan.map.max_topk + k];
  return expert < 0 ? 0.0F
                    : call.source_weights
                          [token * call.me.map.num_experts + call.plan.chosen_expert(expert)];
}

// With `kCopied` the call goes by copy engines (copy_engines/combine.cu): all sums are here when
// the kernel begins, by rank and arrival.
template <bool kCopied, class Shape = ItemShape>
class CombineSum {
 public:
  static constexpr bool kScales = false;
  static constexpr bool kStoresEmpty = true;  // a token without routes gets zeros

  __device__ CombineSum(const CombineLaunch& call, const CallSetup& setup, const Team& team)
      : call_(call), setup_(setup), me_(call.me), team_(team), shape_(call.me.num_ranks) {
    max_topk_ = static_cast<int>(call.plan.map.max_topk);
    num_tokens_ = call.plan.header()->num_tokens;
    chunk_tokens_ = chunk_tokens(num_tokens_);
    per_token_ = min(me_.num_ranks, call.topk);
    arrival_ = call.plan.arrival();  // once: to find it takes divisions
    primary_ = call.plan.primary();
    const std::byte* own = control_of(me_, me_.rank);
    staged_ = call.is_eager ? own + me_.map.eager_rows_offset(setup.epoch)
                            : static_cast<const std::byte*>(call.staged);
    returned_ =
        reinterpret_cast<const float*>(own + me_.map.returned_offset(setup.epoch, call.is_eager));
  }

  [[nodiscard]] __device__ __forceinline__ const Shape& shape() const { return shape_; }

  // Called by the adding warps before anything else.
  __device__ void begin() const {
    if (!kCopied && call_.has_source_weights) {
      send_weights();
    }
  }

  [[nodiscard]] __device__ __forceinline__ bool is_open() const { return true; }

  struct Place {
    int chunk = 0;
    int first = 0;  // token
  };
  struct Numbers {
    Place place;
    int32_t arrival[kItemSteps];  // at the rank of this lane's position, -1 = none
    int32_t primary[kItemSteps];  // slot there, -1 = no row was kept
  };

  // Returns the tokens of an item; not positive behind the last.
  [[nodiscard]] __device__ __forceinline__ int count_of(const Place& place) const {
    return min(chunk_tokens_, num_tokens_ - place.first);
  }
  [[nodiscard]] __device__ __forceinline__ Place first() const { return place_of(team_.index); }
  [[nodiscard]] __device__ __forceinline__ Place after(const Place& before) const {
    return place_of(before.chunk + team_.count);
  }

  [[nodiscard]] __device__ __forceinline__ Numbers load(const Place& place) const {
    Numbers numbers;
    numbers.place = place;
    const int64_t begin = static_cast<int64_t>(place.first) * me_.num_ranks;
    const int end = count_of(place) * me_.num_ranks;
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      const int position = Shape::position(step);
      const bool is_inside = shape_.has(step) && position < end;
      numbers.arrival[step] = is_inside ? arrival_[begin + position] : -1;
      numbers.primary[step] = is_inside ? primary_[begin + position] : -1;
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
    uint32_t sent[kItemSteps] = {};  // ranks the token went to; used: those where a row was kept
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      if (shape_.has(step)) {
        sent[step] = __ballot_sync(kAllLanes, numbers.arrival[step] >= 0);
        item.used[step] = __ballot_sync(kAllLanes, numbers.primary[step] >= 0);
      }
    }
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      if (shape_.has(step)) {
        const int entry = shape_.entry[step];
        const int rank = Shape::position(step) - entry * me_.num_ranks;
        if constexpr (kCopied) {
          item.row[step] = rank << kCopiedArrivalBits | max(numbers.arrival[step], 0);
        } else {
          const uint32_t lower = entry_bits(shape_, sent, entry) & ((1U << rank) - 1);
          item.row[step] = (place.first + entry) * per_token_ + __popc(lower);
          if (reads_own_rows(call_) && rank == me_.rank) {
            item.row[step] = ~numbers.primary[step];
          }
        }
      }
    }
    return item;
  }

  [[nodiscard]] __device__ __forceinline__ bool wait(const SumItem& item) const {
    bool is_here = true;
    const int peer = lane_index();
    if (!kCopied && peer < me_.num_ranks && !(peer == me_.rank && reads_own_rows(call_))) {
      const WaitSite site = {Op::kCombine, setup_.epoch, peer, WaitFor::kRows};
      const auto slot = me_.map.signals().combine(peer, item.chunk);
      is_here = wait_reached(me_, signal_of(me_, me_.rank, slot), setup_.epoch, site);
    }
    __syncwarp();  // what each lane acquired is every lane's now
    const bool all = __all_sync(kAllLanes, is_here);
    ptx::fence_async_proxy();
    return all;
  }

  [[nodiscard]] __device__ __forceinline__ const std::byte* row(int32_t index) const {
    if constexpr (kCopied) {
      const int64_t arrival = index & ((1 << kCopiedArrivalBits) - 1);
      return setup_.rows[index >> kCopiedArrivalBits] + arrival * call_.payload.row_bytes;
    } else {
      const std::byte* rows = index < 0 ? call_.rows : staged_;
      return rows + static_cast<int64_t>(index < 0 ? ~index : index) * call_.payload.row_bytes;
    }
  }
  [[nodiscard]] __device__ __forceinline__ std::byte* out(int, int32_t row) const {
    return call_.out + static_cast<int64_t>(row) * call_.payload.row_bytes;
  }

  __device__ __forceinline__ void finish(int, int chunk, int count, uint32_t n) const {
    if (call_.out_weights == nullptr || static_cast<int>(n) % team_.warps != team_.warp) {
      return;
    }
    return_token_weights(call_, chunk * chunk_tokens_, count, [&](int64_t route, int token, int k) {
      return *const_cast<const volatile float*>(returned_at(route, token, k));
    });
  }

 private:
  // Returns where the weight of a token's kept route k was returned.
  [[nodiscard]] __device__ __forceinline__ const float* returned_at(int64_t route, int token, int k)
      const {
    const auto local_experts = static_cast<int>(call_.plan.map.experts_per_rank.divisor());
    if constexpr (kCopied) {
      const int rank = call_.plan.route_expert()[route] / local_experts;
      const int64_t arrival = arrival_[static_cast<int64_t>(token) * me_.num_ranks + rank];
      return setup_.weights[rank] + arrival * max_topk_ + k;
    }
    if (reads_own_rows(call_) && call_.plan.route_expert()[route] / local_experts == me_.rank) {
      const int64_t slot = call_.plan.route_slot()[route];
      return call_.row_weights + (call_.one_row ? slot * call_.topk + k : slot);
    }
    return returned_ + route;
  }

  // Sends kSourceWeights: beside eager rows as words that each rank can read at once; else as
  // [arrival][k] to each rank the token went to, and the last warp tells all ranks.
  __device__ void send_weights() const {
    const int lane = lane_index();
    const int num_warps = team_.count * team_.warps;
    const int warp = team_.index * team_.warps + team_.warp;
    for (int token = warp; token < num_tokens_; token += num_warps) {
      float weight = given_weight(call_, call_.source_weights, token);
      if (lane < call_.topk) {
        weight = counted_weight(call_, token, lane, weight);
      }
      if (call_.is_eager) {
        send_words(token, weight);
        continue;
      }
      float* mine = nullptr;
      if (lane < me_.num_ranks) {
        const int32_t arrival = arrival_[static_cast<int64_t>(token) * me_.num_ranks + lane];
        if (arrival >= 0) {
          mine = setup_.weights[lane] + static_cast<int64_t>(arrival) * max_topk_;
        }
      }
      store_weights(mine, weight, call_.topk);
    }
    if (!call_.is_eager) {
      tell_ranks(num_warps);
    }
  }

  // Sends a token's weights as words; lane k has the weight of route k.
  __device__ __forceinline__ void send_words(int token, float weight) const {
    if (lane_index() >= call_.topk) {
      return;
    }
    const int at = token * max_topk_ + lane_index();
    for (int offset = 0; offset < me_.num_ranks; ++offset) {
      const int next = me_.rank + 1 + offset;
      const int rank = next < me_.num_ranks ? next : next - me_.num_ranks;
      uint64_t* words = routing_of(me_, rank, setup_.epoch, me_.rank) + me_.map.routing().weights();
      store_tagged(words + at, setup_.epoch, __float_as_uint(weight));
    }
  }

  // The last of the warps that have stored weights raises the signals.
  __device__ __forceinline__ void tell_ranks(int num_warps) const {
    const int lane = lane_index();
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
    if (is_last != 0 && lane < me_.num_ranks && !is_lost(me_, lane)) {
      ptx::fence_sys();
      const auto slot = me_.map.signals().source_weights(static_cast<uint32_t>(me_.rank));
      ptx::store_relaxed_sys(setup_.signals[lane] + slot, setup_.epoch);
    }
  }

  [[nodiscard]] __device__ __forceinline__ Place place_of(int chunk) const {
    return {chunk, chunk * chunk_tokens_};
  }

  const CombineLaunch& call_;
  const CallSetup& setup_;
  const RankView& me_;
  Team team_;
  Shape shape_;
  int max_topk_;
  int num_tokens_;
  int chunk_tokens_;
  int per_token_;
  const int32_t* arrival_;
  const int32_t* primary_;
  const std::byte* staged_;
  const float* returned_;
};

}  // namespace weft
