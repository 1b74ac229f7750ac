// SPDX-License-Identifier: Apache-2.0
// How combine adds rows with the bulk copy engine. A block has three kinds of warps: two loaders,
// which learn what is to be added and keep shared memory filled with rows, each for every second
// item; eight that add, each its columns of every row; and one that signals. A loader is never more
// than a few items ahead, and nobody waits for the whole block. To prepare an item takes a loader
// as long as the adding of its rows takes eight warps, hence two of them.
#pragma once

#include "kernels/row_sum.cuh"

namespace weft {

inline constexpr int kItemSlots = 8;      // items that the loaders may be ahead
inline constexpr int kMaxRowStages = 32;  // rows, or pieces of rows, in shared memory
inline constexpr int kRowStageBytes = 190 * 1024;
inline constexpr int32_t kPipelinePiece = kSumVectors * kMoverWarps * kWarpLanes * 16;
inline constexpr int kLoaders = 2;
inline constexpr unsigned kLoaderBarrier = 1;  // 0 is everybody's
inline constexpr int kPipelineThreads = (kMoverWarps + 1 + kLoaders) * kWarpLanes;

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

struct PipelineShared {
  PipelineItem items[kItemSlots];
  uint64_t item_full[kItemSlots];
  uint64_t item_empty[kItemSlots];
  uint64_t row_full[kMaxRowStages];
  uint64_t row_empty[kMaxRowStages];
  int32_t is_shut;  // a loader may not begin
};

#if __CUDA_ARCH__ >= 900

// Of each loader, one after the other.
struct RowStages {
  std::byte* data;
  int32_t bytes;  // of one stage
  int32_t count;  // of one loader
  int32_t batch;  // that the loader awaits together
  Pieces pieces;  // of a row
};

__device__ __forceinline__ RowStages row_stages(std::byte* data, int64_t row_bytes) {
  RowStages stages;
  stages.data = data;
  stages.pieces = cut_row(row_bytes, kPipelinePiece);
  stages.bytes = (stages.pieces.each + 127) / 128 * 128;
  stages.count = min(kMaxRowStages, kRowStageBytes / stages.bytes) / kLoaders;
  stages.batch = max(1, stages.count / 2);  // the others shall be on their way meanwhile
  return stages;
}

// Every thread of the block, before a barrier.
__device__ __forceinline__ void init_pipeline(PipelineShared& shared) {
  if (threadIdx.x == 0) {
    shared.is_shut = 0;
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
    PipelineShared& shared,
    int first_stage,  // of this loader
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
        const int index = first_stage + at.index;
        wait_barrier(shared.row_empty + index, at.parity ^ 1U);
        ptx::bulk_load(
            stages.data + index * stages.bytes,
            data[step] + piece * stages.pieces.each,
            static_cast<uint32_t>(stages.pieces.bytes(piece)),
            shared.row_full + index
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
    const Source& source, int loader, const RowStages& stages, PipelineShared& shared
) {
  RingPlace slot = {.index = loader};
  RingPlace stage;
  if (!source.is_open()) {
    shared.is_shut = 1;
  }
  // All or none: whoever signals counts items in their order.
  __barrier_sync_count(kLoaderBarrier, kLoaders * kWarpLanes);
  const bool is_open = shared.is_shut == 0;
  typename Source::Place place = source.first();
  typename Source::Numbers numbers = source.load(place);  // of the next item, on their way
  place = source.after(place);                            // of the one after that
  for (;;) {
    SumItem item = source.resolve(numbers);
    numbers = source.load(place);
    place = source.after(place);
    item.is_there = is_open && item.is_there && source.wait(item);
    wait_barrier(shared.item_empty + slot.index, slot.parity ^ 1U);
    write_item(source, item, shared.items[slot.index]);
    __syncwarp();
    if (lane_index() == 0) {
      ptx::arrive(shared.item_full + slot.index);
    }
    slot.advance(kItemSlots, kLoaders);
    if (!item.is_there) {
      return;
    }
    load_item(source, item, stages, shared, loader * stages.count, stage);
  }
}

// The warps that add: thread i has every 256th vector of 16 bytes of a row.
template <class Element, bool kScaled, class Source>
__device__ void add_rows(Source& source, const RowStages& stages, PipelineShared& shared) {
  RingPlace slot;
  RingPlace stage;        // of the loader whose item it is
  RingPlace other_stage;  // of the other
  int first_stage = 0;
  int ended = 0;  // loaders; the rows of the other must still be taken
  uint32_t finished = 0;
  const int thread = static_cast<int>(threadIdx.x);
  const auto next = [&] {
    slot.advance(kItemSlots);
    const RingPlace last = stage;
    stage = other_stage;
    other_stage = last;
    first_stage = stages.count - first_stage;
  };
  for (;;) {
    wait_barrier(shared.item_full + slot.index, slot.parity);
    const PipelineItem& item = shared.items[slot.index];
    if (item.is_end != 0) {
      if (++ended == kLoaders) {
        return;
      }
      next();
      continue;
    }
    const float* scales = item.scale;
    for (int entry = 0; entry < item.count; ++entry) {
      const int num_rows = item.num_rows[entry];
      for (int piece = 0; piece < stages.pieces.count; ++piece) {
        const int32_t bytes = stages.pieces.bytes(piece);
        float sums[kSumVectors][Element::kPerVector];
        const auto add_row = [&](int row, bool is_first) {
          const int index = first_stage + stage.index;
          wait_barrier(shared.row_full + index, stage.parity);
          const std::byte* data = stages.data + index * stages.bytes;
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
            ptx::arrive(shared.row_empty + index);
          }
          stage.advance(stages.count);
          const float scale = kScaled ? scales[row] : 1.0F;
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
      scales += num_rows;
    }
    source.finish(item.source, item.chunk, item.count, finished++);
    __syncwarp();
    if (lane_index() == 0) {
      ptx::arrive(shared.item_empty + slot.index);
    }
    next();
    if (ended > 0) {
      next();  // nothing more comes from the one that has ended
    }
  }
}

#endif

}  // namespace weft
