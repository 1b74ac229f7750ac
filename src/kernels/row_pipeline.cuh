// SPDX-License-Identifier: Apache-2.0
// How combine adds rows with the bulk copy engine. A block has three kinds of warps: one loader,
// which learns what is to be added and keeps shared memory filled with rows; eight that add, each
// its columns of every row; and one that signals. The loader is never more than a few items ahead,
// and nobody waits for the whole block.
#pragma once

#include "kernels/row_sum.cuh"

namespace weft {

inline constexpr int kItemSlots = 4;      // items that the loader may be ahead
inline constexpr int kMaxRowStages = 32;  // rows, or pieces of rows, in shared memory
inline constexpr int kRowStageBytes = 190 * 1024;
inline constexpr int32_t kPipelinePiece = kSumVectors * kMoverWarps * kWarpLanes * 16;
inline constexpr int kPipelineThreads = (kMoverWarps + 2) * kWarpLanes;

// What the adding warps must know of an item, in shared memory.
struct PipelineItem {
  int32_t is_end;  // no item: the role is through
  int32_t source;
  int32_t chunk;
  int32_t count;
  int32_t num_rows[kMaxEntries];
  int32_t out_row[kMaxEntries];
  float scale[kMaxEntries][kWarpLanes];
};

struct PipelineShared {
  PipelineItem items[kItemSlots];
  uint64_t item_full[kItemSlots];
  uint64_t item_empty[kItemSlots];
  uint64_t row_full[kMaxRowStages];
  uint64_t row_empty[kMaxRowStages];
};

#if __CUDA_ARCH__ >= 900

struct RowStages {
  std::byte* data;
  int32_t bytes;  // of one stage
  int32_t count;
  Pieces pieces;  // of a row
};

__device__ __forceinline__ RowStages row_stages(std::byte* data, int64_t row_bytes) {
  RowStages stages;
  stages.data = data;
  stages.pieces = cut_row(row_bytes, kPipelinePiece);
  stages.bytes = (stages.pieces.each + 127) / 128 * 128;
  stages.count = min(kMaxRowStages, kRowStageBytes / stages.bytes);
  return stages;
}

// Every thread of the block, before a barrier.
__device__ __forceinline__ void init_pipeline(PipelineShared& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kItemSlots; ++i) {
      ptx::init_barrier(shared.item_full + i, 1);
      ptx::init_barrier(shared.item_empty + i, kMoverWarps);
    }
    for (int i = 0; i < kMaxRowStages; ++i) {
      ptx::init_barrier(shared.row_full + i, 1);
      ptx::init_barrier(shared.row_empty + i, kMoverWarps);
    }
    ptx::publish_barriers();
  }
}

// Counts through a ring: where the n-th use is, and in which phase.
struct RingPlace {
  int32_t index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int32_t count) {
    if (++index == count) {
      index = 0;
      parity ^= 1U;
    }
  }
};

__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t parity) {
  while (!ptx::try_wait_barrier(barrier, parity)) {
  }
}

// The loader warp. A given-up call still ends the items, so that the others leave.
template <class Source>
__device__ void load_rows(const Source& source, const RowStages& stages, PipelineShared& shared) {
  RingPlace slot;
  RingPlace stage;
  typename Source::Numbers numbers;  // of the next item, on their way
  typename Source::Place place;      // of the one after that
  if (source.is_open()) {
    numbers = source.load(source.locate(0));
    place = source.locate(1);
  }
  for (;;) {
    const SumItem item = source.resolve(numbers);
    numbers = source.load(place);
    place = source.locate(item.ordinal + 2);
    const bool is_good = item.ordinal >= 0 && source.wait(item);
    wait_barrier(shared.item_empty + slot.index, slot.parity ^ 1U);
    PipelineItem& out = shared.items[slot.index];
    if (lane_index() == 0) {
      out.is_end = is_good ? 0 : 1;
      out.source = item.source;
      out.chunk = item.chunk;
      out.count = item.count;
#pragma unroll
      for (int entry = 0; entry < kMaxEntries; ++entry) {
        out.num_rows[entry] = item.num_rows[entry];
        out.out_row[entry] = item.out_row[entry];
      }
    }
    if constexpr (Source::kScales) {
#pragma unroll
      for (int entry = 0; entry < kMaxEntries; ++entry) {
        out.scale[entry][lane_index()] = item.scale[entry];
      }
    }
    __syncwarp();
    if (lane_index() == 0) {
      ptx::arrive(shared.item_full + slot.index);
    }
    slot.advance(kItemSlots);
    if (!is_good) {
      return;
    }
    for (int entry = 0; entry < item.count; ++entry) {
      const int num_rows = pick(item.num_rows, entry);
      const int32_t rows = pick(item.row, entry);
      for (int piece = 0; piece < stages.pieces.count; ++piece) {
        const auto bytes = static_cast<uint32_t>(stages.pieces.bytes(piece));
        for (int row = 0; row < num_rows; ++row) {
          const int32_t index = __shfl_sync(kAllLanes, rows, row);
          wait_barrier(shared.row_empty + stage.index, stage.parity ^ 1U);
          if (lane_index() == 0) {
            ptx::bulk_load(
                stages.data + stage.index * stages.bytes,
                source.row(index) + piece * stages.pieces.each,
                bytes,
                shared.row_full + stage.index
            );
          }
          stage.advance(stages.count);
        }
      }
    }
  }
}

// The warps that add: thread i has every 256th vector of 16 bytes of a row.
template <class Element, bool kScaled, class Source>
__device__ void add_rows(Source& source, const RowStages& stages, PipelineShared& shared) {
  RingPlace slot;
  RingPlace stage;
  uint32_t finished = 0;
  const int thread = static_cast<int>(threadIdx.x);
  for (;;) {
    wait_barrier(shared.item_full + slot.index, slot.parity);
    const PipelineItem& item = shared.items[slot.index];
    if (item.is_end != 0) {
      return;
    }
    for (int entry = 0; entry < item.count; ++entry) {
      const int num_rows = item.num_rows[entry];
      for (int piece = 0; piece < stages.pieces.count; ++piece) {
        const int32_t bytes = stages.pieces.bytes(piece);
        float sums[kSumVectors][Element::kPerVector];
        const auto add_row = [&](int row, bool is_first) {
          wait_barrier(shared.row_full + stage.index, stage.parity);
          const std::byte* data = stages.data + stage.index * stages.bytes;
          uint4 bits[kSumVectors];
#pragma unroll
          for (int i = 0; i < kSumVectors; ++i) {
            const int at = (i * kMoverWarps * kWarpLanes + thread) * 16;
            if (at < bytes) {
              bits[i] = *reinterpret_cast<const uint4*>(data + at);
            }
          }
          __syncwarp();
          if (lane_index() == 0) {
            ptx::arrive(shared.row_empty + stage.index);
          }
          stage.advance(stages.count);
          const float scale = kScaled ? item.scale[entry][row] : 1.0F;
#pragma unroll
          for (int i = 0; i < kSumVectors; ++i) {
            const int at = (i * kMoverWarps * kWarpLanes + thread) * 16;
            if (at < bytes) {
              float values[Element::kPerVector];
              unpack<Element>(bits[i], values);
#pragma unroll
              for (int j = 0; j < Element::kPerVector; ++j) {
                const float term = kScaled ? __fmul_rn(values[j], scale) : values[j];
                sums[i][j] = is_first ? term : __fadd_rn(sums[i][j], term);
              }
            }
          }
        };
        if (num_rows > 0) {
          add_row(0, true);
          for (int row = 1; row < num_rows; ++row) {
            add_row(row, false);
          }
        } else if (!Source::kStoresEmpty) {
          continue;
        }
        std::byte* out = source.out(item.source, item.out_row[entry]) + piece * stages.pieces.each;
#pragma unroll
        for (int i = 0; i < kSumVectors; ++i) {
          const int at = (i * kMoverWarps * kWarpLanes + thread) * 16;
          if (at < bytes) {
            ptx::store_16(out + at, num_rows > 0 ? pack<Element>(sums[i]) : uint4{0, 0, 0, 0});
          }
        }
      }
    }
    source.finish(item.source, item.chunk, item.count, finished++);
    __syncwarp();
    if (lane_index() == 0) {
      ptx::arrive(shared.item_empty + slot.index);
    }
    slot.advance(kItemSlots);
  }
}

#endif

}  // namespace weft
