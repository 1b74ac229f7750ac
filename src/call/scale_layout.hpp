// SPDX-License-Identifier: Apache-2.0
// Places of a row's scales in the output, for each ScaleLayout; for host and device.
#pragma once

#include <cstdint>

#include "core/hd.hpp"
#include "weft/calls.hpp"

namespace weft {

inline constexpr int64_t kScaleWord = 4;  // bytes, of what is not kByRow
inline constexpr int32_t kScaleTileRows = 128;

// Returns the number of tiles in a block of `stride` rows.
WEFT_HD constexpr int32_t scale_tiles(int32_t stride) {
  return (stride + kScaleTileRows - 1) / kScaleTileRows;
}

// Returns the rows of the scale output for `num_rows` rows, in expert blocks of `stride`.
constexpr int64_t num_scale_rows(ScaleLayout layout, int64_t num_rows, int64_t stride) {
  if (layout != ScaleLayout::kInTiles || stride == 0) {
    return num_rows;
  }
  return num_rows / stride * scale_tiles(static_cast<int32_t>(stride)) * kScaleTileRows;
}

struct ScaleWords {
  int64_t first;  // where word 0 of a row lies, in bytes
  int64_t step;   // from one word to the next
};

// Returns where the `row_bytes` of a row's scales lie.
WEFT_HD constexpr ScaleWords scale_words(
    ScaleLayout layout, int64_t row_bytes, int32_t stride, int32_t row
) {
  if (layout == ScaleLayout::kByRow) {
    return {row * row_bytes, kScaleWord};
  }
  const int32_t in_block = row % stride;
  if (layout == ScaleLayout::kByColumn) {
    return {(row - in_block) * row_bytes + in_block * kScaleWord, stride * kScaleWord};
  }
  constexpr int32_t kColumn = 32;  // rows of a tile in each of its four columns
  const int64_t tile = row / stride * int64_t{scale_tiles(stride)} + in_block / kScaleTileRows;
  const int32_t in_tile = in_block % kScaleTileRows;
  const int32_t place = in_tile % kColumn * (kScaleTileRows / kColumn) + in_tile / kColumn;
  return {tile * row_bytes * kScaleTileRows + place * kScaleWord, kScaleTileRows * kScaleWord};
}

}  // namespace weft
