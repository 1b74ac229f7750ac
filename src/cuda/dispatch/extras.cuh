// SPDX-License-Identifier: Apache-2.0
// Extras that dispatch writes besides rows of tokens: a warp puts the weights, scale rows, sources
// and experts of an item's arrivals where they belong, loading everything of an item before it
// stores anything, so that it waits for memory once; and it zeroes the padding between an expert's
// last row and the end of its block. Where an arrival has one row, which is there already, a part
// of a warp handles an item. fan_out.cuh and eager.cuh call it.
#pragma once

#include "call/scale_layout.hpp"
#include "cuda/device/row_mover.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// The plan's records of the arrivals that one chunk of one source's tokens made here. Lanes are
// counted among those that have the item.
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

// Place of the scales of a row of the output, word by word.
struct ScalePlace {
  std::byte* first;
  int64_t step;  // from one word to the next
};

// `word_bytes` is kScaleWord where scales do not lie by row.
__device__ __forceinline__ ScalePlace
scale_place(const DispatchLaunch& call, int32_t row, int word_bytes) {
  const int64_t bytes = call.payload.scale_bytes;
  if (call.scale_layout == ScaleLayout::kByRow) {
    return {call.out_scales + row * bytes, word_bytes};
  }
  const ScaleWords words = scale_words(call.scale_layout, bytes, call.scale_stride, row);
  return {call.out_scales + words.first, words.step};
}

// One warp writes how many rows each expert has, by the finished plan.
__device__ __forceinline__ void tell_counts(const DispatchLaunch& call) {
  if (call.out_counts == nullptr && call.count_sums == nullptr) {
    return;
  }
  const int num_experts = static_cast<int>(call.plan.map.experts_per_rank.divisor());
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

// One warp writes counts of zero, for a dispatch that is given up.
__device__ __forceinline__ void tell_no_counts(const DispatchLaunch& call) {
  const int num_experts = static_cast<int>(call.plan.map.experts_per_rank.divisor());
  for (int expert = lane_index(); call.out_counts != nullptr && expert < num_experts;
       expert += kWarpLanes) {
    call.out_counts[expert] = 0;
  }
}

class DispatchExtras {
 public:
  // `lanes`, a power of two, share an item: a whole warp, unless an arrival has one row
  // (rank_major).
  __device__ explicit DispatchExtras(const DispatchLaunch& call, int lanes = kWarpLanes)
      : call_(call), lanes_(lanes), lane_(lane_index() & (lanes - 1)) {
    const auto bits = reinterpret_cast<uintptr_t>(call.out_scales) |
                      static_cast<uintptr_t>(call.payload.scale_bytes);
    is_wide_ = bits % sizeof(uint4) == 0 && call.scale_layout == ScaleLayout::kByRow;
    has_words_ = bits % sizeof(uint32_t) == 0;
  }

  // Moves an item's extras. `weights` [count, max_topk] and `scales`, rows of staged_scale_bytes(),
  // lie as pushed.
  __device__ __forceinline__ void move(
      const ArrivalRecords& records, const float* weights, const std::byte* scales
  ) const {
    if (call_.one_row) {
      add_to_rows(records, weights);
    } else {
      if (call_.out_weights != nullptr) {
        move_weights(records, weights);
      }
      if (call_.out_sources != nullptr) {
        store_sources(records);
      }
    }
    if (call_.out_scales != nullptr) {
      move_scales(records, scales);
    }
  }

 private:
  // Returns whether arrival `i` has a row for this lane.
  [[nodiscard]] __device__ __forceinline__ bool has_route(const ArrivalRecords& records, int i)
      const {
    return i < records.count && lane_ < records.num_routes[i];
  }
  // Returns whether arrival `i` has any row.
  [[nodiscard]] static __device__ __forceinline__ bool has_row(
      const ArrivalRecords& records, int i
  ) {
    return i < records.count && records.num_routes[i] > 0;
  }

  __device__ __forceinline__ void move_weights(const ArrivalRecords& records, const float* weights)
      const {
    float weight[kMaxChunkTokens];
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      const float* of_arrival = weights + i * int64_t{call_.plan.map.max_topk};
      weight[i] = has_route(records, i) ? load_fresh(of_arrival + records.k(i)) : 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      if (has_route(records, i)) {
        call_.out_weights[records.slot[i]] = weight[i];
      }
    }
  }

  __device__ __forceinline__ void store_sources(const ArrivalRecords& records) const {
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      if (has_route(records, i)) {
        store_source(records, i, records.slot[i]);
      }
    }
  }

  __device__ __forceinline__ void store_source(const ArrivalRecords& records, int i, int64_t row)
      const {
    int32_t* to = call_.out_sources + 2 * row;
    to[0] = records.source;
    to[1] = records.token[i];
  }

  // rank_major: gives a token's row the weights of all its routes, zero where not kept here, and
  // each route's local expert, -1 likewise.
  __device__ __forceinline__ void add_to_rows(const ArrivalRecords& records, const float* weights)
      const {
    const bool has_weights = call_.out_weights != nullptr;
    const bool has_experts = call_.out_experts != nullptr;
    const bool is_choice = lane_ < call_.topk;
    float weight[kMaxChunkTokens];
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      const float* of_arrival = weights + i * int64_t{call_.plan.map.max_topk};
      const bool is_wanted = has_weights && i < records.count && is_choice;
      weight[i] = is_wanted ? load_fresh(of_arrival + lane_) : 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      const int64_t row = row_of(records, i);
      const bool is_route = (has_weights || has_experts) && has_route(records, i);
      const auto k = static_cast<uint32_t>(is_route ? records.k(i) : 0);
      const uint32_t kept = or_of_lanes(is_route ? 1U << k : 0U);
      const bool is_kept = (kept >> static_cast<uint32_t>(lane_) & 1U) != 0;
      if (!has_row(records, i)) {
        continue;
      }
      const int64_t first = row * call_.topk;
      if (has_weights && is_choice) {
        call_.out_weights[first + lane_] = is_kept ? weight[i] : 0.0F;
      }
      if (has_experts && is_route) {
        call_.out_experts[first + k] = records.origin[i] >> 8;
      }
      if (has_experts && is_choice && !is_kept) {
        call_.out_experts[first + lane_] = -1;
      }
      if (call_.out_sources != nullptr && lane_ == 0) {
        store_source(records, i, row);
      }
    }
  }

  // rank_major: returns the row of arrival `i`, if it has one.
  [[nodiscard]] __device__ __forceinline__ int64_t
  row_of(const ArrivalRecords& records, int i) const {
    return __shfl_sync(kAllLanes, records.slot[i], 0, lanes_);
  }

  // Returns the OR of `bits` over the lanes that have the same item.
  [[nodiscard]] __device__ __forceinline__ uint32_t or_of_lanes(uint32_t bits) const {
    for (int step = 1; step < lanes_; step *= 2) {
      bits |= __shfl_xor_sync(kAllLanes, bits, step);
    }
    return bits;
  }

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

  template <class Unit>
  __device__ __forceinline__ void copy_scales(
      const ArrivalRecords& records, const std::byte* staged
  ) const {
    const auto units =
        static_cast<int>(call_.payload.scale_bytes / static_cast<int64_t>(sizeof(Unit)));
    const int64_t stride = call_.payload.staged_scale_bytes();
    for (int first = 0; first < units; first += lanes_) {
      const int at = first + lane_;
      Unit values[kMaxChunkTokens];
#pragma unroll
      for (int i = 0; i < kMaxChunkTokens; ++i) {
        if (has_row(records, i) && at < units) {
          values[i] = load_fresh(reinterpret_cast<const Unit*>(staged + i * stride) + at);
        }
      }
#pragma unroll
      for (int i = 0; i < kMaxChunkTokens; ++i) {
        if (call_.one_row) {
          const int64_t row = row_of(records, i);
          if (has_row(records, i) && at < units) {
            const ScalePlace place = scale_place(call_, static_cast<int32_t>(row), sizeof(Unit));
            *reinterpret_cast<Unit*>(place.first + at * place.step) = values[i];
          }
          continue;
        }
        const ScalePlace place = scale_place(call_, records.slot[i], sizeof(Unit));
        const Targets targets = {has_route(records, i) ? place.first : nullptr, nullptr};
        for_each_target(targets, [&](std::byte* to) {
          if (at < units) {
            *reinterpret_cast<Unit*>(to + at * place.step) = values[i];
          }
        });
      }
    }
  }

  // Loads what a peer wrote during this kernel, never from a cache that could be older.
  template <class T>
  [[nodiscard]] static __device__ __forceinline__ T load_fresh(const T* address) {
    return *const_cast<const volatile T*>(address);
  }
  [[nodiscard]] static __device__ __forceinline__ uint4 load_fresh(const uint4* address) {
    return ptx::load_16(address);
  }

  const DispatchLaunch& call_;
  int lanes_;
  int lane_;  // among them
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

// Gives rows behind the last used one the expert -1; each of `num_warps` warps does its share.
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

// Parts in which each expert's padding is zeroed. A guess.
inline constexpr int kPaddingParts = 8;

// Returns the parts of the padding of all experts.
__device__ __forceinline__ int num_padding_parts(const DispatchLaunch& call) {
  const int num_experts = static_cast<int>(call.plan.map.experts_per_rank.divisor());
  return call.has_padding ? kPaddingParts * num_experts : 0;
}

// One warp zeroes part `part` of the padding.
__device__ inline void zero_padding(const DispatchLaunch& call, int part) {
  const PlanView& plan = call.plan;
  const int num_experts = static_cast<int>(call.plan.map.experts_per_rank.divisor());
  const int expert = part % num_experts;
  const int64_t begin = plan.expert_begin()[expert];
  const int64_t end = min(begin + plan.padded_rows_per_expert()[expert], call.num_rows);
  int64_t row = begin + plan.rows_per_expert()[expert] + part / num_experts;
  for (; row < end; row += kPaddingParts) {
    zero_row(call, row);
  }
}

}  // namespace weft
