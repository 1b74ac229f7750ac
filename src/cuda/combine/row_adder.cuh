// SPDX-License-Identifier: Apache-2.0
// The adding warps of a pipeline (row_pipeline.cuh): they add the rows that its loader
// (row_loader.cuh) has brought to shared memory.
#pragma once

#include <type_traits>

#include "cuda/combine/row_pipeline.cuh"

namespace weft {

// One sum, or one piece of it, from the pipeline's next stages. The lanes of all its adders take 16
// bytes each in turn.
template <class Shape, class Element, bool kScaled>
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
  constexpr int kStep = Shape::kAdders * kWarpLanes * 16;
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
}

// The warps that add.
template <class Element, bool kScaled, class Shape, class Source>
__device__ void add_rows(
    Source& source, const PipelineRole& role, const RowStages& stages, PipelineShared<Shape>& shared
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
    for (int piece = 0; piece < stages.pieces.count; ++piece) {
      const float* scales = item.scale;
      for (int entry = 0; entry < item.count; ++entry) {
        const int num_rows = item.num_rows[entry];
        if (num_rows == 0 && !Source::kStoresEmpty) {
          continue;
        }
        std::byte* out = source.out(item.source, item.out_row[entry]);
        add_piece<Shape, Element, kScaled>(
            stages,
            pipeline,
            stage,
            first,
            stages.pieces.bytes(piece),
            num_rows,
            scales,
            out + piece * stages.pieces.each
        );
        scales += num_rows;
      }
    }
    source.finish(item.source, item.chunk, item.count, finished);
    ptx::arrive(pipeline.item_empty + slot.index);
    slot.advance(kItemSlots);
  }
}

}  // namespace weft
