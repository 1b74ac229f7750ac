// SPDX-License-Identifier: Apache-2.0
// How combine adds rows with the bulk copy engine, and which kernel a call takes. A block has
// several pipelines, and one warp that signals. Each pipeline has one loader warp, which finds out
// what is to be added and keeps shared memory filled with rows, and some warps that add, each its
// part of every row; row_warps.cuh has both. A loader is at most a few items ahead, and no pipeline
// waits for another. Finding out, waiting and passing on take about as many instructions as adding,
// so few warps share a row and a block has many pipelines: whatever one of them waits for, the
// others go on.
#pragma once

#include "cuda/combine/row_sum.cuh"
#include "cuda/device/kernel.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// The first two numbers are guesses. From compute capability 9.0 on a block may have 227 KiB of
// shared memory; 190 KiB of it for rows, also a guess, leave room for the rest.
inline constexpr int kItemSlots = 4;      // items that a loader may be ahead
inline constexpr int kMaxRowStages = 16;  // rows, or pieces of rows, of a pipeline in shared memory
inline constexpr int kRowStageBytes = 190 * 1024;  // of all pipelines of a block
inline constexpr unsigned kLoaderBarrier = 1;      // a hardware barrier; __syncthreads() has 0

// The shape of a block: how many pipelines it has, and how many warps of each add.
template <int kNumPipelines, int kNumAdders>
struct PipelineShape {
  static constexpr int kPipelines = kNumPipelines;
  static constexpr int kAdders = kNumAdders;
  static constexpr int kAddingWarps = kPipelines * kAdders;
  static constexpr int kThreads = (kAddingWarps + kPipelines + 1) * kWarpLanes;
  static constexpr int32_t kPiece = kSumVectors * kAdders * kWarpLanes * 16;  // at a time
  static_assert(kPipelines <= kMaxTeams && kAdders <= kMaxTeamWarps);
};

// Pipelines of a block, and warps of each that add. The shorter a row, the fewer warps can share it
// without waiting more than they add. Both shapes are guesses.
using ShortRows = PipelineShape<5, 2>;
using LongRows = PipelineShape<3, 4>;

// How rows come to the warps that add them: into registers, for few tokens with less to find out
// (OneEntry), or by one of the two pipelines.
enum class RowPath : uint8_t { kVector, kFewTokens, kShortRows, kLongRows };
inline constexpr RowPath kRowPaths[] = {
    RowPath::kVector, RowPath::kFewTokens, RowPath::kShortRows, RowPath::kLongRows};

inline RowPath path_of(Mover mover, int64_t row_bytes) {
  if (mover != Mover::kBulk) {
    return RowPath::kVector;
  }
  return row_bytes <= ShortRows::kPiece ? RowPath::kShortRows : RowPath::kLongRows;
}

// Returns bulk(the Shape of the path's pipelines), or vector() for a path without.
template <class Bulk, class Vector>
auto with_shape(RowPath path, const Bulk& bulk, const Vector& vector) {
  switch (path) {
    case RowPath::kShortRows:
      return bulk(ShortRows());
    case RowPath::kLongRows:
      return bulk(LongRows());
    default:
      return vector();
  }
}

using CombineKernel = Kernel<CombineLaunch>;

// An item in shared memory, as the loader describes it to the adding warps.
struct PipelineItem {
  int32_t is_end;  // no item: the role is through
  int32_t source;
  int32_t chunk;
  int32_t count;
  int32_t num_rows[kMaxEntries];
  int32_t out_row[kMaxEntries];
  float scale[kMaxEntries * kWarpLanes];  // of the rows, one after the other
};

struct Pipeline {
  PipelineItem items[kItemSlots];
  uint64_t item_full[kItemSlots];
  uint64_t item_empty[kItemSlots];
  uint64_t row_full[kMaxRowStages];
  uint64_t row_empty[kMaxRowStages];
};

template <class Shape>
struct PipelineShared {
  Pipeline pipelines[Shape::kPipelines];
  int32_t is_shut;  // a loader may not begin
};

// The shared memory for rows of one pipeline.
struct RowStages {
  std::byte* data;
  int32_t bytes;  // of one stage
  int32_t count;
  int32_t batch;  // that the loader awaits together
  Pieces pieces;  // of a row
};

template <class Shape>
__device__ __forceinline__ RowStages row_stages(std::byte* data, int64_t row_bytes, int pipeline) {
  RowStages stages;
  stages.pieces = cut_row(row_bytes, Shape::kPiece);
  stages.bytes = (stages.pieces.each + 127) / 128 * 128;
  stages.count = min(kMaxRowStages, kRowStageBytes / Shape::kPipelines / stages.bytes);
  stages.batch = max(1, stages.count / 2);  // the others shall be on their way meanwhile
  stages.data = data + pipeline * stages.count * stages.bytes;
  return stages;
}

// Role of a warp of the block: the adding warps are the first, pipeline by pipeline, then come the
// loaders, then the one that signals.
struct PipelineRole {
  int pipeline;  // of the one that signals: any
  int adder;     // in the pipeline; -1: it does not add
  bool is_loader;
};

template <class Shape>
__device__ __forceinline__ PipelineRole pipeline_role() {
  const int warp = warp_in_block();
  if (warp < Shape::kAddingWarps) {
    return {warp / Shape::kAdders, warp % Shape::kAdders, false};
  }
  const int loader = warp - Shape::kAddingWarps;
  return {loader % Shape::kPipelines, -1, loader < Shape::kPipelines};
}

// Returns the team of a pipeline, among a role's `num_blocks`. Neighbouring teams sit on different
// multiprocessors.
template <class Shape>
__device__ __forceinline__ Team pipeline_team(const PipelineRole& role, int block, int num_blocks) {
  return {
      .index = team_index(block, num_blocks, role.pipeline),
      .count = Shape::kPipelines * num_blocks,
      .warp = max(role.adder, 0),
      .warps = Shape::kAdders,
      .in_block = role.pipeline};
}

// Inits barriers. Every thread of the block calls it, before a barrier.
template <class Shape>
__device__ __forceinline__ void init_pipelines(PipelineShared<Shape>& shared) {
  if (threadIdx.x == 0) {
    shared.is_shut = 0;
    for (Pipeline& one : shared.pipelines) {
      for (int i = 0; i < kItemSlots; ++i) {
        ptx::init_barrier(one.item_full + i, kWarpLanes);
        ptx::init_barrier(one.item_empty + i, Shape::kAdders * kWarpLanes);
      }
      for (int i = 0; i < kMaxRowStages; ++i) {
        ptx::init_barrier(one.row_full + i, 1);
        ptx::init_barrier(one.row_empty + i, Shape::kAdders * kWarpLanes);
      }
    }
    ptx::publish_barriers();
  }
}

// Counts through a ring: the place of the next use, and its phase.
struct RingPlace {
  int32_t index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int32_t count, int32_t by = 1) {
    index += by;
    if (index >= count) {
      index -= count;
      parity ^= 1U;
    }
  }
};

// Waits without a deadline, unlike device/row_mover.cuh: a warp that waits for a peer before it
// arrives here gives up at its deadline and says so (tests/model/pipeline.pml shows that all of
// these waits end then), and any condition on the outcome in the adding warps' loops costs 40 of
// 306 us on 24 multiprocessors (case A, one H200).
__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t parity) {
  while (!ptx::try_wait_barrier(barrier, parity)) {
  }
}

}  // namespace weft
