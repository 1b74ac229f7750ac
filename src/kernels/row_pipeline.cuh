// SPDX-License-Identifier: Apache-2.0
// How combine adds rows with the bulk copy engine. A block has some pipelines, each a loader warp,
// which learns what is to be added and keeps shared memory filled with rows, and two warps that
// add, each half of every row; and one warp that signals. A loader is a few items ahead at most,
// and no pipeline waits for another. To find out, to wait and to pass on takes about as many
// instructions as to add, so a row is shared by few warps, and there are many pipelines: whatever
// one of them waits for, the others go on.
#pragma once

#include <type_traits>

#include "kernels/row_sum.cuh"

namespace weft {

inline constexpr int kPipelines = 5;      // of a block
inline constexpr int kAdders = 2;         // warps of a pipeline that add
inline constexpr int kItemSlots = 4;      // items that a loader may be ahead
inline constexpr int kMaxRowStages = 16;  // rows, or pieces of rows, of a pipeline in shared memory
inline constexpr int kRowStageBytes = 190 * 1024;  // of all
inline constexpr int32_t kPipelinePiece = kSumVectors * kAdders * kWarpLanes * 16;
inline constexpr unsigned kLoaderBarrier = 1;  // 0 is everybody's
inline constexpr int kAddingWarps = kPipelines * kAdders;
inline constexpr int kPipelineThreads = (kAddingWarps + kPipelines + 1) * kWarpLanes;
static_assert(kPipelines <= kMaxTeams && kAdders <= kMaxTeamWarps);

// What the adding warps must know of an item, in shared memory.
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

struct PipelineShared {
  Pipeline pipelines[kPipelines];
  int32_t is_shut;  // a loader may not begin
};

#if __CUDA_ARCH__ >= 900

// Of one pipeline.
struct RowStages {
  std::byte* data;
  int32_t bytes;  // of one stage
  int32_t count;
  int32_t batch;  // that the loader awaits together
  Pieces pieces;  // of a row
};

__device__ __forceinline__ RowStages row_stages(std::byte* data, int64_t row_bytes, int pipeline) {
  RowStages stages;
  stages.pieces = cut_row(row_bytes, kPipelinePiece);
  stages.bytes = (stages.pieces.each + 127) / 128 * 128;
  stages.count = min(kMaxRowStages, kRowStageBytes / kPipelines / stages.bytes);
  stages.batch = max(1, stages.count / 2);  // the others shall be on their way meanwhile
  stages.data = data + pipeline * stages.count * stages.bytes;
  return stages;
}

// What a warp of the block does: the adding warps are the first, pipeline by pipeline, then come
// the loaders, then the one that signals.
struct PipelineRole {
  int pipeline;  // of the one that signals: any
  int adder;     // in the pipeline; -1: it does not add
  bool is_loader;
};

__device__ __forceinline__ PipelineRole pipeline_role() {
  const int warp = warp_in_block();
  if (warp < kAddingWarps) {
    return {warp / kAdders, warp % kAdders, false};
  }
  const int loader = warp - kAddingWarps;
  return {loader % kPipelines, -1, loader < kPipelines};
}

// The pipelines of the `num_blocks` of a role. Neighbouring teams sit on different multiprocessors.
__device__ __forceinline__ Team pipeline_team(const PipelineRole& role, int block, int num_blocks) {
  return {
      .index = team_index(block, num_blocks, role.pipeline),
      .count = kPipelines * num_blocks,
      .warp = max(role.adder, 0),
      .warps = kAdders,
      .in_block = role.pipeline};
}

// Every thread of the block, before a barrier.
__device__ __forceinline__ void init_pipelines(PipelineShared& shared) {
  if (threadIdx.x == 0) {
    shared.is_shut = 0;
    for (Pipeline& one : shared.pipelines) {
      for (int i = 0; i < kItemSlots; ++i) {
        ptx::init_barrier(one.item_full + i, 1);
        ptx::init_barrier(one.item_empty + i, kAdders);
      }
      for (int i = 0; i < kMaxRowStages; ++i) {
        ptx::init_barrier(one.row_full + i, 1);
        ptx::init_barrier(one.row_empty + i, kAdders);
      }
    }
    ptx::publish_barriers();
  }
}

// Counts through a ring: where the n-th use is, and in which phase.
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

__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t parity) {
  while (!ptx::try_wait_barrier(barrier, parity)) {
  }
}

// A loader warp: what adding warps must know of an item.
template <class Source>
__device__ __forceinline__ void write_item(
    const Source& source, const SumItem& item, PipelineItem& out
) {
  const ItemShape& shape = source.shape();
  const int lane = lane_index();
  if (lane == 0) {
    out.is_end = item.is_there ? 0 : 1;
    out.source = item.source;
    out.chunk = item.chunk;
    out.count = item.count;
  }
  if (lane < kMaxEntries) {
    out.num_rows[lane] = count_before(shape, item.used, (lane + 1) * shape.width) -
                         count_before(shape, item.used, lane * shape.width);
    out.out_row[lane] = item.out_row;
  }
  if constexpr (Source::kScales) {
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      if (shape.has(step) && (item.used[step] >> lane & 1U) != 0) {
        out.scale[count_before(shape, item.used, ItemShape::position(step))] = item.scale[step];
      }
    }
  }
}

// A loader warp: an item's rows into the next of its stages, each by the lane that has it, entry by
// entry and piece by piece.
template <class Source>
__device__ __forceinline__ void load_item(
    const Source& source,
    const SumItem& item,
    const RowStages& stages,
    Pipeline& pipeline,
    RingPlace& stage
) {
  const ItemShape& shape = source.shape();
  const int num_pieces = stages.pieces.count;
  int32_t ordinal[kItemSteps];   // of this lane's row, its first piece; -1: it has none
  int32_t distance[kItemSteps];  // to its next piece
  const std::byte* data[kItemSteps];
#pragma unroll
  for (int step = 0; step < kItemSteps; ++step) {
    ordinal[step] = -1;
    if (shape.has(step) && (item.used[step] >> lane_index() & 1U) != 0) {
      const int before = count_before(shape, item.used, ItemShape::position(step));
      data[step] = source.row(item.row[step]);
      ordinal[step] = before;
      distance[step] = 1;
      if (num_pieces > 1) {
        const int begin = shape.entry[step] * shape.width;
        const int first = count_before(shape, item.used, begin);
        ordinal[step] += first * (num_pieces - 1);
        distance[step] = count_before(shape, item.used, begin + shape.width) - first;
      }
    }
  }
  const int total = count_before(shape, item.used, kItemSteps * kWarpLanes) * num_pieces;
  for (int done = 0; done < total; done += stages.batch) {
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      if (!shape.has(step) || ordinal[step] < 0) {
        continue;
      }
      for (int piece = 0; piece < num_pieces; ++piece) {
        const int place = ordinal[step] + piece * distance[step] - done;
        if (place < 0 || place >= stages.batch) {
          continue;
        }
        RingPlace at = stage;
        at.advance(stages.count, place);
        wait_barrier(pipeline.row_empty + at.index, at.parity ^ 1U);
        ptx::bulk_load(
            stages.data + at.index * stages.bytes,
            data[step] + piece * stages.pieces.each,
            static_cast<uint32_t>(stages.pieces.bytes(piece)),
            pipeline.row_full + at.index
        );
      }
    }
    __syncwarp();
    stage.advance(stages.count, min(stages.batch, total - done));
  }
}

// A loader warp, whose source hands out its items. A given-up call still ends them, so that the
// others leave.
template <class Source>
__device__ void load_rows(
    const Source& source, int index, const RowStages& stages, PipelineShared& shared
) {
  Pipeline& pipeline = shared.pipelines[index];
  RingPlace slot;
  RingPlace stage;
  if (!source.is_open()) {
    shared.is_shut = 1;
  }
  // All or none: whoever signals counts items in their order.
  __barrier_sync_count(kLoaderBarrier, kPipelines * kWarpLanes);
  const bool is_open = shared.is_shut == 0;
  typename Source::Place place = source.first();
  typename Source::Numbers numbers = source.load(place);  // of the next item, on their way
  place = source.after(place);                            // of the one after that
  for (;;) {
    SumItem item = source.resolve(numbers);
    numbers = source.load(place);
    place = source.after(place);
    item.is_there = is_open && item.is_there && source.wait(item);
    wait_barrier(pipeline.item_empty + slot.index, slot.parity ^ 1U);
    write_item(source, item, pipeline.items[slot.index]);
    __syncwarp();
    if (lane_index() == 0) {
      ptx::arrive(pipeline.item_full + slot.index);
    }
    slot.advance(kItemSlots);
    if (!item.is_there) {
      return;
    }
    load_item(source, item, stages, pipeline, stage);
  }
}

// One sum, or one piece of it, from the pipeline's next stages. Lane 0 of the pipeline's first
// adder has the first 16 bytes, and every 64th after them.
template <class Element, bool kScaled>
__device__ __forceinline__ void add_piece(
    const RowStages& stages,
    Pipeline& pipeline,
    RingPlace& stage,
    int first,  // byte of this lane
    int32_t bytes,
    int num_rows,
    const float* scales,
    std::byte* out
) {
  constexpr int kStep = kAdders * kWarpLanes * 16;
  float sums[kSumVectors][Element::kPerVector];
  const auto add_row = [&](int row, auto is_first) {
    wait_barrier(pipeline.row_full + stage.index, stage.parity);
    const std::byte* data = stages.data + stage.index * stages.bytes + first;
    uint4 bits[kSumVectors];
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i) {
      bits[i] = first + i * kStep < bytes ? *reinterpret_cast<const uint4*>(data + i * kStep)
                                          : uint4{0, 0, 0, 0};
    }
    __syncwarp();
    if (lane_index() == 0) {
      ptx::arrive(pipeline.row_empty + stage.index);
    }
    stage.advance(stages.count);
    const float scale = kScaled ? scales[row] : 1.0F;
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i) {
      float values[Element::kPerVector];
      unpack<Element>(bits[i], values);
#pragma unroll
      for (int j = 0; j < Element::kPerVector; ++j) {
        const float term = kScaled ? __fmul_rn(values[j], scale) : values[j];
        sums[i][j] = is_first ? term : __fadd_rn(sums[i][j], term);
      }
    }
  };
  if (num_rows > 0) {
    add_row(0, std::true_type{});
  }
  for (int row = 1; row < num_rows; ++row) {
    add_row(row, std::false_type{});
  }
#pragma unroll
  for (int i = 0; i < kSumVectors; ++i) {
    if (first + i * kStep < bytes) {
      ptx::store_16(
          out + first + i * kStep, num_rows > 0 ? pack<Element>(sums[i]) : uint4{0, 0, 0, 0}
      );
    }
  }
}

// The warps that add.
template <class Element, bool kScaled, class Source>
__device__ void add_rows(
    Source& source, const PipelineRole& role, const RowStages& stages, PipelineShared& shared
) {
  Pipeline& pipeline = shared.pipelines[role.pipeline];
  const int first = (role.adder * kWarpLanes + lane_index()) * 16;
  RingPlace slot;
  RingPlace stage;
  for (uint32_t finished = 0;; ++finished) {
    wait_barrier(pipeline.item_full + slot.index, slot.parity);
    const PipelineItem& item = pipeline.items[slot.index];
    if (item.is_end != 0) {
      return;
    }
    const float* scales = item.scale;
    for (int entry = 0; entry < item.count; ++entry) {
      const int num_rows = item.num_rows[entry];
      if (num_rows == 0 && !Source::kStoresEmpty) {
        continue;
      }
      std::byte* out = source.out(item.source, item.out_row[entry]);
      for (int piece = 0; piece < stages.pieces.count; ++piece) {
        add_piece<Element, kScaled>(
            stages,
            pipeline,
            stage,
            first,
            stages.pieces.bytes(piece),
            num_rows,
            scales,
            out + piece * stages.pieces.each
        );
      }
      scales += num_rows;
    }
    source.finish(item.source, item.chunk, item.count, finished);
    __syncwarp();
    if (lane_index() == 0) {
      ptx::arrive(pipeline.item_empty + slot.index);
    }
    slot.advance(kItemSlots);
  }
}

#endif

}  // namespace weft
