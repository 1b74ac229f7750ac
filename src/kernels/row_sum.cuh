// SPDX-License-Identifier: Apache-2.0
// Sums rows in fp32, in a fixed order, and rounds once. Both roles of combine are this, over other
// rows: a *source* hands out items of a few entries; each entry is some rows and the place of their
// sum. It does so in three steps, so that a warp can ask for the next items while it works on one:
// locate() begins to read where the item's numbers lie, load() to read them, and only resolve()
// looks at what has come.
#pragma once

#include "kernels/elements.cuh"
#include "kernels/row_mover.cuh"
#include "kernels/team.cuh"

namespace weft {

inline constexpr int kSumVectors = 4;  // of 16 bytes, per lane and row
inline constexpr int32_t kSumPiece = kSumVectors * kWarpLanes * 16;

inline constexpr int kMaxEntries = kMaxChunkTokens;  // of an item

// Spread over a warp: what is said to be of lane i is held by that lane, all else by every lane.
struct SumItem {
  int32_t ordinal = -1;  // among the team's items; -1: there are no more
  int32_t source = 0;
  int32_t chunk = 0;
  int32_t count = 0;  // entries
  int32_t num_rows[kMaxEntries];
  int32_t out_row[kMaxEntries];
  int32_t row[kMaxEntries];  // of lane i: the entry's i-th row
  float scale[kMaxEntries];  // of lane i: its factor
};

// Sums of one piece of one entry, in registers.
template <class Element, bool kScaled>
class PieceSum {
 public:
  __device__ __forceinline__ void add(
      const uint4 (&bits)[kSumVectors], float scale, bool is_first
  ) {
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i) {
      float values[Element::kPerVector];
      unpack<Element>(bits[i], values);
#pragma unroll
      for (int j = 0; j < Element::kPerVector; ++j) {
        const float term = kScaled ? __fmul_rn(values[j], scale) : values[j];
        sums_[i][j] = is_first ? term : __fadd_rn(sums_[i][j], term);
      }
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

template <class Source>
__device__ __forceinline__ SumItem fetch(const Source& source, int ordinal) {
  return source.resolve(source.load(source.locate(ordinal)));
}

// Runs all items of a team's source, 16-byte loads two rows ahead.
template <class Element, bool kScaled, class Source>
__device__ void sum_rows_vector(Source& source, const Slice& slice) {
  for (SumItem item = fetch(source, 0); item.ordinal >= 0; item = fetch(source, item.ordinal + 1)) {
    if (!source.wait(item)) {
      return;
    }
    for (int entry = 0; entry < item.count; ++entry) {
      const int num_rows = pick(item.num_rows, entry);
      const int32_t rows = pick(item.row, entry);
      const float scales = pick(item.scale, entry);
      for (int piece = 0; piece < slice.pieces.count; ++piece) {
        const int32_t offset = slice.offset + piece * slice.pieces.each;
        const int32_t bytes = slice.pieces.bytes(piece);
        std::byte* out = source.out(item.source, pick(item.out_row, entry)) + offset;
        if (num_rows == 0) {
          if (Source::kStoresEmpty) {
            store_zeros(out, bytes);
          }
          continue;
        }
        PieceSum<Element, kScaled> sum;
        uint4 bits[2][kSumVectors];
        const auto load = [&](int row, uint4(&to)[kSumVectors]) {
          const std::byte* data = source.row(__shfl_sync(kAllLanes, rows, row)) + offset;
#pragma unroll
          for (int i = 0; i < kSumVectors; ++i) {
            const int at = (i * kWarpLanes + lane_index()) * 16;
            to[i] = at < bytes ? ptx::load_16(data + at) : uint4{0, 0, 0, 0};
          }
        };
        load(0, bits[0]);
        for (int row = 0; row < num_rows; row += 2) {
          if (row + 1 < num_rows) {
            load(row + 1, bits[1]);
          }
          sum.add(bits[0], __shfl_sync(kAllLanes, scales, row), row == 0);
          if (row + 2 < num_rows) {
            load(row + 2, bits[0]);
          }
          if (row + 1 < num_rows) {
            sum.add(bits[1], __shfl_sync(kAllLanes, scales, row + 1), false);
          }
        }
        sum.store(out, bytes);
      }
    }
    source.finish(item.source, item.chunk, item.count, static_cast<uint32_t>(item.ordinal));
  }
}

}  // namespace weft
