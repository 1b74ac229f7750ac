// SPDX-License-Identifier: Apache-2.0
// Which kernel of combine a call takes: one whose warps load rows into registers, or one of two
// that load rows into shared memory with the bulk copy engine (row_pipeline.cuh).
#pragma once

#include "cuda/combine/row_pipeline.cuh"
#include "cuda/device/kernel.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// Pipelines of a block, and warps of each that add. The shorter a row, the fewer warps can share it
// without waiting more than they add. Both shapes are guesses.
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
