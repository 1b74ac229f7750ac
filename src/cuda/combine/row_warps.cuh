// SPDX-License-Identifier: Apache-2.0
// The two kinds of warps of a pipeline (row_pipeline.cuh). The loader finds out what is to be
// added, tells the adding warps, and has the bulk copy engine bring the rows to shared memory; the
// adding warps add them. combine.cu and copy_engines/combine.cu run them.
#pragma once

#include <type_traits>

#include "cuda/combine/row_pipeline.cuh"

namespace weft {

// Tells adding warps of an item; called by a loader warp.
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
    out.num_rows[lane] = __popc(entry_bits(shape, item.used, lane));
    out.out_row[lane] = item.out_row;
  }
  if constexpr (Source::kScales) {
    int before = 0;
#pragma unroll
    for (int step = 0; step < kItemSteps; ++step) {
      if (shape.has(step)) {
        if ((item.used[step] >> lane & 1U) != 0) {
          out.scale[before + __popc(item.used[step] & ((1U << lane) - 1))] = item.scale[step];
        }
        before += __popc(item.used[step]);
      }
    }
  }
}

// Loads, by a loader warp, an item's rows into the next stages, piece by piece, each by the lane
// that has it. Adding warps free stages in order: the last of some is free after the others.
template <class Source>
__device__ __forceinline__ void load_item(
    const Source& source,
    const SumItem& item,
    const RowStages& stages,
    Pipeline& pipeline,
    RingPlace& stage
) {
  const ItemShape& shape = source.shape();
  for (int piece = 0; piece < stages.pieces.count; ++piece) {
    const auto bytes = static_cast<uint32_t>(stages.pieces.bytes(piece));
#pragma unroll 1
    for (int step = 0; step < shape.steps; ++step) {
      const uint32_t used = pick(item.used, step);
      const std::byte* data = source.row(pick(item.row, step)) + piece * stages.pieces.each;
      const bool has_row = (used >> lane_index() & 1U) != 0;
      const int ordinal = __popc(used & ((1U << lane_index()) - 1));
      const int total = __popc(used);
      for (int done = 0; done < total; done += stages.batch) {
        const int count = min(stages.batch, total - done);
        RingPlace last = stage;
        last.advance(stages.count, count - 1);
        wait_barrier(pipeline.row_empty + last.index, last.parity ^ 1U);
        const int place = ordinal - done;
        if (has_row && place >= 0 && place < count) {
          RingPlace at = stage;
          at.advance(stages.count, place);
          ptx::bulk_load(
              stages.data + at.index * stages.bytes, data, bytes, pipeline.row_full + at.index
          );
        }
        __syncwarp();
        stage.advance(stages.count, count);
      }
    }
  }
}

// Runs a loader warp over its source's items. A given-up call still ends the items, so that the
// adding warps leave.
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
  // All loaders of a block begin, or none: the warp that signals counts items in their order.
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
    ptx::arrive(pipeline.item_full + slot.index);
    slot.advance(kItemSlots);
    if (!item.is_there) {
      return;
    }
    load_item(source, item, stages, pipeline, stage);
  }
}

// Runs an adding warp: adds each sum, or a piece of it, from the pipeline's next stages. The lanes
// of all the pipeline's adders take 16 bytes each in turn.
template <class Element, bool kScaled, class Shape, class Source>
__device__ void add_rows(
    Source& source, const PipelineRole& role, const RowStages& stages, PipelineShared<Shape>& shared
) {
  constexpr int kStep = Shape::kAdders * kWarpLanes * 16;
  Pipeline& pipeline = shared.pipelines[role.pipeline];
  const int first = (role.adder * kWarpLanes + lane_index()) * 16;  // byte of this lane
  RingPlace slot;
  RingPlace stage;
  const auto add_piece = [&](int32_t bytes, int num_rows, const float* scales, std::byte* out) {
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
      ptx::fence_async_proxy_shared();  // the loads have returned
      ptx::arrive(pipeline.row_empty + stage.index);
      stage.advance(stages.count);
      const float scale = kScaled ? scales[row] : 1.0F;
#pragma unroll
      for (int i = 0; i < kSumVectors; ++i) {
        add_vector<Element, kScaled>(bits[i], scale, is_first, sums[i]);
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
  };
  for (uint32_t finished = 0;; ++finished) {
    wait_barrier(pipeline.item_full + slot.index, slot.parity);
    const PipelineItem& item = pipeline.items[slot.index];
    if (item.is_end != 0) {
      return;
    }
    for (int piece = 0; piece < stages.pieces.count; ++piece) {
      const int32_t offset = piece * stages.pieces.each;
      const float* scales = item.scale;
      for (int entry = 0; entry < item.count; ++entry) {
        const int num_rows = item.num_rows[entry];
        if (num_rows == 0 && !Source::kStoresEmpty) {
          continue;
        }
        std::byte* out = source.out(item.source, item.out_row[entry]);
        add_piece(stages.pieces.bytes(piece), num_rows, scales, out + offset);
        scales += num_rows;
      }
    }
    source.finish(item.source, item.chunk, item.count, finished);
    ptx::arrive(pipeline.item_empty + slot.index);
    slot.advance(kItemSlots);
  }
}

}  // namespace weft
