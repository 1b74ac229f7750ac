// SPDX-License-Identifier: Apache-2.0
// The loader of a pipeline (row_pipeline.cuh): learns what is to be added, tells it to the adding
// warps, and lets the bulk copy engine bring the rows.
#pragma once

#include "kernels/row_pipeline.cuh"

namespace weft {

#if __CUDA_ARCH__ >= 900

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
template <class Shape, class Source>
__device__ void load_rows(
    const Source& source, int index, const RowStages& stages, PipelineShared<Shape>& shared
) {
  Pipeline& pipeline = shared.pipelines[index];
  RingPlace slot;
  RingPlace stage;
  if (!source.is_open()) {
    shared.is_shut = 1;
  }
  // All or none: whoever signals counts items in their order.
  __barrier_sync_count(kLoaderBarrier, Shape::kPipelines * kWarpLanes);
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

#endif

}  // namespace weft
