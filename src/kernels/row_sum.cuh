// SPDX-License-Identifier: Apache-2.0
// Sums rows in fp32, in the order given, and rounds once: one warp, one piece of the rows at a
// time.
#pragma once

#include "kernels/elements.cuh"
#include "kernels/row_mover.cuh"

namespace weft {

inline constexpr int kSumVectors = 4;  // of 16 bytes, per lane and row
inline constexpr int32_t kSumPiece = kSumVectors * kWarpLanes * 16;

// A row's piece in registers.
struct PieceBits {
  uint4 bits[kSumVectors];
};

__device__ __forceinline__ PieceBits load_piece(const std::byte* data, int32_t bytes) {
  PieceBits piece;
#pragma unroll
  for (int i = 0; i < kSumVectors; ++i) {
    const int at = (i * kWarpLanes + lane_index()) * 16;
    if (at < bytes) {
      piece.bits[i] = ptx::load_16(data + at);
    }
  }
  return piece;
}

__device__ __forceinline__ void store_piece(
    std::byte* data, int32_t bytes, const PieceBits& piece
) {
#pragma unroll
  for (int i = 0; i < kSumVectors; ++i) {
    const int at = (i * kWarpLanes + lane_index()) * 16;
    if (at < bytes) {
      ptx::store_16(data + at, piece.bits[i]);
    }
  }
}

// Rows 0 .. count - 1 are row_of(i) (a pointer to the piece, the same on all lanes), each
// multiplied by scale_of(i) if kScaled. Products and sums are rounded one by one, as on the CPU.
template <class Element, bool kScaled, class RowOf, class ScaleOf>
__device__ __forceinline__ PieceBits
sum_piece(int count, int32_t bytes, const RowOf& row_of, const ScaleOf& scale_of) {
  constexpr int kPer = Element::kPerVector;
  PieceBits next = load_piece(row_of(0), bytes);
  if (count == 1 && !kScaled) {
    return next;
  }
  float sums[kSumVectors][kPer];
  PieceBits after = count > 1 ? load_piece(row_of(1), bytes) : next;
  for (int row = 0; row < count; ++row) {
    const PieceBits current = next;
    next = after;
    if (row + 2 < count) {
      after = load_piece(row_of(row + 2), bytes);
    }
    const float scale = kScaled ? scale_of(row) : 1.0F;
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i) {
      float values[kPer];
      unpack<Element>(current.bits[i], values);
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const float term = kScaled ? __fmul_rn(values[j], scale) : values[j];
        sums[i][j] = row == 0 ? term : __fadd_rn(sums[i][j], term);
      }
    }
  }
  PieceBits result;
#pragma unroll
  for (int i = 0; i < kSumVectors; ++i) {
    result.bits[i] = pack<Element>(sums[i]);
  }
  return result;
}

}  // namespace weft
