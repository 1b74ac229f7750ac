// SPDX-License-Identifier: Apache-2.0
// Sums rows in fp32, in a fixed order, and rounds once. Both roles of combine do this, with other
// rows: a *source* (CombineReduce of reduce.cuh, CombineSum of sum.cuh) hands out items of a few
// entries; an entry is some rows and the place of their sum. A source works in steps, so that a
// warp can ask for the next items while it works on one: first() and after() begin to read where an
// item's numbers lie, load() begins to read the numbers, and only resolve() uses them.
//
// Here are the types of items, and the loop that loads rows into registers; row_pipeline.cuh has
// the other way.
#pragma once

#include "cuda/device/elements.cuh"
#include "cuda/device/row_mover.cuh"
#include "cuda/device/team.cuh"

namespace weft {

inline constexpr int kSumVectors = 4;  // of 16 bytes, per lane and row; a guess
inline constexpr int32_t kSumPiece = kSumVectors * kWarpLanes * 16;

inline constexpr int kMaxEntries = kMaxChunkTokens;  // of an item
inline constexpr int kItemSteps = kMaxEntries;       // an entry has up to 32 positions

// An item's rows lie in positions, `width` for each entry, of which some are empty. They are spread
// over the warp: position p is lane p % 32 of step p / 32. The one warp that prepares items looks
// at 32 positions at a time; one by one would take it longer than all that follows.
struct ItemShape {
  int32_t width = 1;
  int32_t steps = 1;
  int32_t entry[kItemSteps] = {};  // of this lane's position of each step

  __device__ explicit ItemShape(int item_width) : width(item_width) {
    steps = (kMaxEntries * width + kWarpLanes - 1) / kWarpLanes;
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      entry[step] = position(step) / width;
    }
  }
  [[nodiscard]] static __device__ __forceinline__ int position(int step) {
    return step * kWarpLanes + lane_index();
  }
  [[nodiscard]] __device__ __forceinline__ bool has(int step) const {
    return step == 0 || step < steps;
  }
};

// Shape of an item that is one entry, since a chunk is one token: it needs no division and no
// choice of a step. Calls of few tokens last about as long as it takes to fetch their instructions.
struct OneEntry {
  static constexpr int32_t steps = 1;
  int32_t width = 1;
  int32_t entry[kItemSteps] = {};

  __device__ explicit OneEntry(int item_width) : width(item_width) {}
  [[nodiscard]] static __device__ __forceinline__ int position(int /*step*/) {
    return lane_index();
  }
  [[nodiscard]] static constexpr __device__ bool has(int step) { return step == 0; }
};

struct SumItem {
  bool is_there = false;  // false: there are no more
  int32_t source = 0;
  int32_t chunk = 0;
  int32_t count = 0;               // entries
  int32_t out_row = 0;             // of lane i: where entry i's sum goes
  uint32_t used[kItemSteps] = {};  // positions that have a row
  int32_t row[kItemSteps] = {};    // of this lane's positions
  float scale[kItemSteps] = {};    // and their factors
};

// Returns the positions of one entry: bit i is its i-th.
__device__ __forceinline__ uint32_t
entry_bits(const ItemShape& shape, const uint32_t (&bits)[kItemSteps], int entry) {
  const int begin = entry * shape.width;
  const int step = begin / kWarpLanes;
  const int shift = begin % kWarpLanes;
  const uint64_t two =
      pick(bits, step) | static_cast<uint64_t>(step + 1 < kItemSteps ? pick(bits, step + 1) : 0)
                             << 32;
  const auto found = static_cast<uint32_t>(two >> shift);
  return shape.width == kWarpLanes ? found : found & ((1U << shape.width) - 1);
}

__device__ __forceinline__ uint32_t
entry_bits(const OneEntry& /*shape*/, const uint32_t (&bits)[kItemSteps], int /*entry*/) {
  return bits[0];
}

// Returns what an item has in a position, from the lane that has it.
template <class T>
__device__ __forceinline__ T
at_position(const ItemShape& /*shape*/, const T (&values)[kItemSteps], int position) {
  return __shfl_sync(kAllLanes, pick(values, position / kWarpLanes), position);
}
template <class T>
__device__ __forceinline__ T
at_position(const OneEntry& /*shape*/, const T (&values)[kItemSteps], int position) {
  return __shfl_sync(kAllLanes, values[0], position);
}

// Adds one vector of a row to its sums; the first vector begins them.
template <class Element, bool kScaled>
__device__ __forceinline__ void add_vector(
    const uint4& bits, float scale, bool is_first, float (&sums)[Element::kPerVector]
) {
  float values[Element::kPerVector];
  unpack<Element>(bits, values);
#pragma unroll
  for (int j = 0; j < Element::kPerVector; ++j) {
    const float term = kScaled ? __fmul_rn(values[j], scale) : values[j];
    sums[j] = is_first ? term : __fadd_rn(sums[j], term);
  }
}

// Sums of one piece of one entry, in registers.
template <class Element, bool kScaled>
class PieceSum {
 public:
  __device__ __forceinline__ void add(
      const uint4 (&bits)[kSumVectors], float scale, bool is_first
  ) {
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i) {
      add_vector<Element, kScaled>(bits[i], scale, is_first, sums_[i]);
    }
  }

  __device__ __forceinline__ void store(std::byte* out, int32_t bytes) const {
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i) {
      const int at = (i * kWarpLanes + lane_index()) * 16;
      if (at < bytes) {
        ptx::store_16(out + at, pack<Element>(sums_[i]));
      }
    }
  }

 private:
  float sums_[kSumVectors][Element::kPerVector];
};

__device__ __forceinline__ void store_zeros(std::byte* out, int32_t bytes) {
  for (int at = lane_index() * 16; at < bytes; at += kWarpLanes * 16) {
    ptx::store_16(out + at, uint4{0, 0, 0, 0});
  }
}

// Sums all items of a team's source by 16-byte loads, two rows ahead.
template <class Element, bool kScaled, class Source>
__device__ void sum_rows_vector(Source& source, const Slice& slice) {
  const auto& shape = source.shape();
  uint32_t finished = 0;
  for (auto at = source.first();; at = source.after(at)) {
    const SumItem item = source.resolve(source.load(at));
    if (!item.is_there || !source.wait(item)) {
      return;
    }
    for (int entry = 0; entry < item.count; ++entry) {
      const uint32_t used = entry_bits(shape, item.used, entry);
      std::byte* const out_begin =
          source.out(item.source, __shfl_sync(kAllLanes, item.out_row, entry)) + slice.offset;
      for (int piece = 0; piece < slice.pieces.count; ++piece) {
        const int32_t offset = piece * slice.pieces.each;
        const int32_t bytes = slice.pieces.bytes(piece);
        if (used == 0) {
          if (Source::kStoresEmpty) {
            store_zeros(out_begin + offset, bytes);
          }
          continue;
        }
        PieceSum<Element, kScaled> sum;
        uint4 bits[2][kSumVectors];
        float scale[2];
        uint32_t left = used;
        const auto load = [&](int buffer) {
          const int position = entry * shape.width + __ffs(static_cast<int>(left)) - 1;
          left &= left - 1;
          const int32_t row = at_position(shape, item.row, position);
          scale[buffer] = kScaled ? at_position(shape, item.scale, position) : 1.0F;
          const std::byte* data = source.row(row) + slice.offset + offset;
#pragma unroll
          for (int i = 0; i < kSumVectors; ++i) {
            const int place = (i * kWarpLanes + lane_index()) * 16;
            bits[buffer][i] = place < bytes ? ptx::load_16(data + place) : uint4{0, 0, 0, 0};
          }
        };
        const int num_rows = __popc(used);
        load(0);
        for (int row = 0; row < num_rows; row += 2) {
          if (row + 1 < num_rows) {
            load(1);
          }
          sum.add(bits[0], scale[0], row == 0);
          if (row + 2 < num_rows) {
            load(0);
          }
          if (row + 1 < num_rows) {
            sum.add(bits[1], scale[1], false);
          }
        }
        sum.store(out_begin + offset, bytes);
      }
    }
    source.finish(item.source, item.chunk, item.count, finished++);
  }
}

}  // namespace weft
