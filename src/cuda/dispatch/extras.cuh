// SPDX-License-Identifier: Apache-2.0
// What dispatch writes besides rows of tokens: a warp puts the weights, scale rows, sources
// and experts of an item's arrivals where they belong, loading everything of an item before it
// stores anything, so that it waits for memory once; and it zeroes the padding between an expert's
// last row and the end of its block. fan_out.cuh and eager.cuh call it.
#pragma once

#include "call/scale_layout.hpp"
#include "cuda/device/row_mover.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// What the plan says of the arrivals that one chunk of one source's tokens made here.
struct ArrivalRecords {
  bool is_there = false;
  int32_t source = 0;
  int32_t chunk = 0;
  int32_t begin = 0;  // number of the first arrival
  int32_t count = 0;
  int32_t num_routes[kMaxChunkTokens];
  int32_t slot[kMaxChunkTokens];  // lane i: of the arrival's i-th route
  // Lane i: that route's expert on this rank << 8 | which of its token's routes it is; only with
  // weights or experts.
  int32_t origin[kMaxChunkTokens];
  int32_t token[kMaxChunkTokens];  // on the source; only with sources

  [[nodiscard]] __device__ __forceinline__ int32_t k(int i) const { return origin[i] & 0xff; }
};

// Where the scales of a row of the output lie, word by word.
struct ScalePlace {
  std::byte* first;
  int64_t step;  // from one word to the next
};

// word_bytes: kScaleWord where scales do not lie by row.
__device__ __forceinline__ ScalePlace
scale_place(const DispatchLaunch& call, int32_t row, int word_bytes) {
  const int64_t bytes = call.payload.scale_bytes;
  if (call.scale_layout == ScaleLayout::kByRow) {
    return {call.out_scales + row * bytes, word_bytes};
  }
  const ScaleWords words = scale_words(call.scale_layout, bytes, call.scale_stride, row);
  return {call.out_scales + words.first, words.step};
}

// One warp writes what the plan, which is made, says of each expert's rows.
__device__ __forceinline__ void tell_counts(const DispatchLaunch& call) {
  if (call.out_counts == nullptr && call.count_sums == nullptr) {
    return;
  }
  const int num_experts = static_cast<int>(call.me.map.num_experts) / call.me.num_ranks;
  for (int expert = lane_index(); expert < num_experts; expert += kWarpLanes) {
    const auto count = static_cast<int32_t>(call.plan.rows_per_expert()[expert]);
    if (call.out_counts != nullptr) {
      call.out_counts[expert] = count;
    }
    if (call.count_sums != nullptr) {
      call.count_sums[expert] += count;
    }
  }
}

class DispatchExtras {
 public:
  __device__ explicit DispatchExtras(const DispatchLaunch& call) : call_(call) {
    const auto bits = reinterpret_cast<uintptr_t>(call.out_scales) |
                      static_cast<uintptr_t>(call.payload.scale_bytes);
    is_wide_ = bits % sizeof(uint4) == 0 && call.scale_layout == ScaleLayout::kByRow;
    has_words_ = bits % sizeof(uint32_t) == 0;
  }

  // `weights` [count, max_topk] as they were pushed.
  __device__ __forceinline__ void move_weights(const ArrivalRecords& records, const float* weights)
      const {
    const int64_t max_topk = call_.plan.map.max_topk;
    const int lane = lane_index();
    float weight[kMaxChunkTokens];
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      const int32_t k = call_.one_row ? lane : records.k(i);
      const bool is_wanted =
          call_.one_row ? i < records.count && lane < call_.topk : has_route(records, i);
      weight[i] = is_wanted ? load_fresh(weights + i * max_topk + k) : 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      if (call_.one_row) {
        store_row_weights(records, i, weight[i]);
      } else if (has_route(records, i)) {
        call_.out_weights[records.slot[i]] = weight[i];
      }
    }
  }

  // `staged` likewise, rows of staged_scale_bytes().
  __device__ __forceinline__ void move_scales(
      const ArrivalRecords& records, const std::byte* staged
  ) const {
    if (is_wide_) {
      copy_scales<uint4>(records, staged);
    } else if (has_words_) {
      copy_scales<uint32_t>(records, staged);
    } else {
      copy_scales<uint8_t>(records, staged);
    }
  }

  __device__ __forceinline__ void store_sources(const ArrivalRecords& records) const {
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      if (has_route(records, i) && (!call_.one_row || lane_index() == 0)) {
        int32_t* to = call_.out_sources + int64_t{2} * records.slot[i];
        to[0] = records.source;
        to[1] = records.token[i];
      }
    }
  }

  // rank_major: what each of the token's routes means here.
  __device__ __forceinline__ void store_experts(const ArrivalRecords& records) const {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      if (i >= records.count || records.num_routes[i] == 0) {
        continue;
      }
      int32_t expert = -1;
      for (int route = 0; route < records.num_routes[i]; ++route) {
        const int32_t origin = __shfl_sync(kAllLanes, records.origin[i], route);
        expert = (origin & 0xff) == lane ? origin >> 8 : expert;
      }
      const int64_t row = __shfl_sync(kAllLanes, records.slot[i], 0);
      if (lane < call_.topk) {
        call_.out_experts[row * call_.topk + lane] = expert;
      }
    }
  }

 private:
  // Whether arrival `i` has a row for this lane.
  [[nodiscard]] static __device__ __forceinline__ bool has_route(
      const ArrivalRecords& records, int i
  ) {
    return i < records.count && lane_index() < records.num_routes[i];
  }

  // rank_major: one row with the weights of all of its token's routes, zero where not kept here.
  __device__ __forceinline__ void store_row_weights(
      const ArrivalRecords& records, int i, float weight
  ) const {
    const int lane = lane_index();
    const uint32_t kept = __reduce_or_sync(
        kAllLanes, has_route(records, i) ? 1U << static_cast<uint32_t>(records.k(i)) : 0U
    );
    const int64_t row = __shfl_sync(kAllLanes, records.slot[i], 0);
    if (kept != 0 && lane < call_.topk) {
      const bool is_kept = (kept >> static_cast<uint32_t>(lane) & 1U) != 0;
      call_.out_weights[row * call_.topk + lane] = is_kept ? weight : 0.0F;
    }
  }

  template <class Unit>
  __device__ __forceinline__ void copy_scales(
      const ArrivalRecords& records, const std::byte* staged
  ) const {
    const auto units =
        static_cast<int>(call_.payload.scale_bytes / static_cast<int64_t>(sizeof(Unit)));
    const int64_t stride = call_.payload.staged_scale_bytes();
    for (int first = 0; first < units; first += kWarpLanes) {
      const int at = first + lane_index();
      Unit values[kMaxChunkTokens];
#pragma unroll
      for (int i = 0; i < kMaxChunkTokens; ++i) {
        if (i < records.count && records.num_routes[i] > 0 && at < units) {
          values[i] = load_fresh(reinterpret_cast<const Unit*>(staged + i * stride) + at);
        }
      }
#pragma unroll
      for (int i = 0; i < kMaxChunkTokens; ++i) {
        const bool is_target = has_route(records, i) && (!call_.one_row || lane_index() == 0);
        const ScalePlace place = scale_place(call_, records.slot[i], sizeof(Unit));
        for_each_target({is_target ? place.first : nullptr, nullptr}, [&](std::byte* to) {
          if (at < units) {
            *reinterpret_cast<Unit*>(to + at * place.step) = values[i];
          }
        });
      }
    }
  }

  // A peer wrote it during this kernel: never from a cache that could be older.
  template <class T>
  [[nodiscard]] static __device__ __forceinline__ T load_fresh(const T* address) {
    return *const_cast<const volatile T*>(address);
  }
  [[nodiscard]] static __device__ __forceinline__ uint4 load_fresh(const uint4* address) {
    return ptx::load_16(address);
  }

  const DispatchLaunch& call_;
  bool is_wide_;
  bool has_words_;
};

// One warp zeroes a row, its weight and its scales.
__device__ __forceinline__ void zero_row(const DispatchLaunch& call, int64_t row) {
  const int lane = lane_index();
  const int64_t row_bytes = call.payload.out_row_bytes();
  std::byte* out = call.out_rows + row * row_bytes;
  for (int64_t at = lane * 16; at < row_bytes; at += kWarpLanes * 16) {
    ptx::store_16(out + at, uint4{0, 0, 0, 0});
  }
  if (call.out_weights != nullptr && lane == 0) {
    call.out_weights[row] = 0;
  }
  if (call.out_scales != nullptr) {
    const int word_bytes = call.scale_layout == ScaleLayout::kByRow ? 1 : int{kScaleWord};
    const ScalePlace place = scale_place(call, static_cast<int32_t>(row), word_bytes);
    for (int64_t at = lane; at < call.payload.scale_bytes; at += kWarpLanes) {
      place.first[at / word_bytes * place.step + at % word_bytes] = std::byte{0};
    }
  }
}

// One of `num_warps` warps says of its share of the rows behind the last one that they go nowhere.
__device__ inline void clear_experts(const DispatchLaunch& call, int warp, int num_warps) {
  if (call.out_experts == nullptr) {
    return;
  }
  const int64_t num_used = call.plan.header()->required_rows;
  for (int64_t row = num_used + warp; row < call.num_rows; row += num_warps) {
    if (lane_index() < call.topk) {
      call.out_experts[row * call.topk + lane_index()] = -1;
    }
  }
}

// Each expert's padding is zeroed in so many parts. The number is a guess.
inline constexpr int kPaddingParts = 8;

// Parts of the padding of all experts.
__device__ __forceinline__ int num_padding_parts(const DispatchLaunch& call) {
  const int num_experts = static_cast<int>(call.me.map.num_experts) / call.me.num_ranks;
  return call.has_padding ? kPaddingParts * num_experts : 0;
}

// One warp zeroes a part.
__device__ inline void zero_padding(const DispatchLaunch& call, int part) {
  const PlanView& plan = call.plan;
  const int num_experts = static_cast<int>(call.me.map.num_experts) / call.me.num_ranks;
  const int expert = part % num_experts;
  const int64_t begin = plan.expert_begin()[expert];
  const int64_t end = begin + plan.padded_rows_per_expert()[expert];
  int64_t row = begin + plan.rows_per_expert()[expert] + part / num_experts;
  for (; row < end; row += kPaddingParts) {
    zero_row(call, row);
  }
}

}  // namespace weft
