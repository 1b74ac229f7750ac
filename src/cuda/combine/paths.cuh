// SPDX-License-Identifier: Apache-2.0
// How rows come to the warps that add them.
#pragma once

#include "cuda/combine/row_pipeline.cuh"
#include "cuda/device/kernel.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// The less a row has, the fewer warps can share it without waiting more than they add.
using ShortRows = PipelineShape<5, 2>;
using LongRows = PipelineShape<3, 4>;

enum class RowPath : uint8_t { kVector, kShortRows, kLongRows };
inline constexpr RowPath kRowPaths[] = {RowPath::kVector, RowPath::kShortRows, RowPath::kLongRows};

inline RowPath path_of(Mover mover, int64_t row_bytes) {
  if (mover != Mover::kBulk) {
    return RowPath::kVector;
  }
  return row_bytes <= ShortRows::kPiece ? RowPath::kShortRows : RowPath::kLongRows;
}

using CombineKernel = Kernel<CombineLaunch>;

}  // namespace weft
