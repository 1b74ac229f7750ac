// SPDX-License-Identifier: Apache-2.0
// How combine adds rows with the bulk copy engine. A block has three kinds of warps: one loader,
// which learns what is to be added and keeps shared memory filled with rows; eight that add, in
// teams just large enough for a row, which take turns with the items; and one that signals. The
// loader is never more than a few items ahead, and nobody waits for the whole block. To add a row
// takes a team much longer than its arithmetic (it waits for the row, reads it, gives it back), so
// teams of few warps with many vectors each, side by side, add more than one team of all.
#pragma once

#include "kernels/row_sum.cuh"

namespace weft {

inline constexpr int kItemSlots = 2 * kMaxTeams;  // items that the loader may be ahead
inline constexpr int kMaxRowStages = 48;          // rows, or pieces of rows, in shared memory
inline constexpr int kRowStageBytes = 190 * 1024;
inline constexpr int kPipelineVectors = 8;  // of 16 bytes, per lane and row
inline constexpr int32_t kWarpPiece = kPipelineVectors * kWarpLanes * 16;
inline constexpr int kPipelineThreads = (kMoverWarps + 2) * kWarpLanes;

// Warps that add a row together; more where few tokens make latency count.
__device__ __forceinline__ int pipeline_warps(int64_t row_bytes, int64_t num_tokens) {
  const int32_t each = num_tokens <= 512 ? kWarpPiece / 2 : kWarpPiece;
  int warps = 1;
  while (warps < kMoverWarps && row_bytes > each * warps) {
    warps *= 2;
  }
  return warps;
}

// What the adding warps must know of an item, in shared memory.
struct PipelineItem {
  int32_t is_end;       // no item: the role is through
  int32_t first_stage;  // where its rows begin
  uint32_t stage_parity;
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

__device__ __forceinline__ RowStages
row_stages(std::byte* data, int64_t row_bytes, int team_warps) {
  RowStages stages;
  stages.data = data;
  stages.pieces = cut_row(row_bytes, team_warps * kWarpPiece);
  stages.bytes = (stages.pieces.each + 127) / 128 * 128;
  stages.count = min(kMaxRowStages, kRowStageBytes / stages.bytes);
  return stages;
}

// Every thread of the block, before a barrier.
__device__ __forceinline__ void init_pipeline(PipelineShared& shared, int team_warps) {
  const int i = static_cast<int>(threadIdx.x);
  const auto arrivals = static_cast<uint32_t>(team_warps);
  if (i < kItemSlots) {
    ptx::init_barrier(shared.item_full + i, 1);
    ptx::init_barrier(shared.item_empty + i, arrivals);
  }
  if (i < kMaxRowStages) {
    ptx::init_barrier(shared.row_full + i, 1);
    ptx::init_barrier(shared.row_empty + i, arrivals);
    ptx::publish_barriers();
  }
}

// Counts through a ring: where the n-th use is, and in which phase.
struct RingPlace {
  int32_t index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int32_t count, int32_t step = 1) {
    index += step;
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

// No more items: told to every team of the block.
__device__ __forceinline__ void end_items(PipelineShared& shared, RingPlace slot, int num_teams) {
  for (int team = 0; team < num_teams; ++team) {
    wait_barrier(shared.item_empty + slot.index, slot.parity ^ 1U);
    if (lane_index() == 0) {
      shared.items[slot.index].is_end = 1;
      ptx::arrive(shared.item_full + slot.index);
    }
    slot.advance(kItemSlots);
  }
}

// The loader warp, whose source is the whole block's: its teams take the items in turn. A given-up
// call still ends the items, so that the others leave.
template <class Source>
__device__ void load_rows(
    const Source& source, const RowStages& stages, int num_teams, PipelineShared& shared
) {
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
    if (item.ordinal < 0 || !source.wait(item)) {
      end_items(shared, slot, num_teams);
      return;
    }
    wait_barrier(shared.item_empty + slot.index, slot.parity ^ 1U);
    PipelineItem& out = shared.items[slot.index];
    if (lane_index() == 0) {
      out.is_end = 0;
      out.first_stage = stage.index;
      out.stage_parity = stage.parity;
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

// The warps that add: of a team of n threads, the i-th has every n-th vector of 16 bytes of a row.
template <class Element, bool kScaled, class Source>
__device__ void add_rows(
    Source& source, const Team& team, const RowStages& stages, PipelineShared& shared
) {
  const int num_teams = kMoverWarps / team.warps;
  const int num_threads = team.warps * kWarpLanes;
  const int thread = team.warp * kWarpLanes + lane_index();
  RingPlace slot = {.index = team.in_block};
  uint32_t finished = 0;
  for (;;) {
    wait_barrier(shared.item_full + slot.index, slot.parity);
    const PipelineItem& item = shared.items[slot.index];
    if (item.is_end != 0) {
      return;
    }
    RingPlace stage = {item.first_stage, item.stage_parity};
    for (int entry = 0; entry < item.count; ++entry) {
      const int num_rows = item.num_rows[entry];
      for (int piece = 0; piece < stages.pieces.count; ++piece) {
        const int32_t bytes = stages.pieces.bytes(piece);
        float sums[kPipelineVectors][Element::kPerVector];
        const auto add_row = [&](int row, bool is_first) {
          wait_barrier(shared.row_full + stage.index, stage.parity);
          const std::byte* data = stages.data + stage.index * stages.bytes;
          uint4 bits[kPipelineVectors];
#pragma unroll
          for (int i = 0; i < kPipelineVectors; ++i) {
            const int at = (i * num_threads + thread) * 16;
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
          for (int i = 0; i < kPipelineVectors; ++i) {
            const int at = (i * num_threads + thread) * 16;
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
        for (int i = 0; i < kPipelineVectors; ++i) {
          const int at = (i * num_threads + thread) * 16;
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
    slot.advance(kItemSlots, num_teams);
  }
}

#endif

}  // namespace weft
