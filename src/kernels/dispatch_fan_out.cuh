// SPDX-License-Identifier: Apache-2.0
// The fan-out role of dispatch: a warp waits for the signal of one chunk of one source, then copies
// each arrival to its other slots (from staging: to all of them) and puts weights and scale rows
// where they belong. Padding is zeroed before the first wait.
#pragma once

#include "kernels/dispatch_extras.cuh"
#include "kernels/dispatch_staged.cuh"
#include "kernels/launch.hpp"
#include "kernels/row_mover.cuh"
#include "kernels/team.cuh"

namespace weft {

// `kIsEarly`: rows came before their slots were known.
template <bool kIsEarly>
class DispatchFanOut {
 public:
  __device__ DispatchFanOut(const DispatchLaunch& call, const CallSetup& setup, RoleBlock block)
      : call_(call), setup_(setup), me_(call.me), staged_(call, setup), extras_(call) {
    warp_ = block.index + warp_in_block() * block.count;
    num_warps_ = kMoverWarps * block.count;
    max_topk_ = static_cast<int>(call.plan.map.max_topk);
    const bool has_extras = call.out_weights != nullptr || call.out_scales != nullptr;
    // Of its own tokens the push role wrote every slot, where it knew them.
    num_sources_ = kIsEarly || has_extras ? me_.num_ranks : me_.num_ranks - 1;
    row_bytes_ = call.quantise == Quantise::kNone ? call.row_bytes : call.row_bytes / 2;
  }

  // `move_rows(role, records, slice)` copies so much of the rows of one item.
  template <class MoveRows>
  __device__ void run(const MoveRows& move_rows) {
    const int items = num_items(me_, setup_, num_sources_);
    const int parts = kIsEarly ? num_parts(items) : 1;
    Records next = load_records(warp_ / parts, items);
    zero_padding();
    for (int index = warp_; index < items * parts; index += num_warps_) {
      const Records records = next;
      const int part = index % parts;
      next = load_records((index + num_warps_) / parts, items);
      if (!records.is_there) {
        continue;
      }
      const auto slot = me_.map.signals().dispatch(
          static_cast<uint32_t>(records.source), static_cast<uint32_t>(records.chunk)
      );
      const WaitSite site = {DeviceOp::kDispatch, setup_.epoch, records.source, WaitFor::kRows};
      if (!wait_reached_warp(me_, signal_of(me_, me_.rank, slot), setup_.epoch, site)) {
        return;
      }
      if (kIsEarly || records.source != me_.rank) {
        move_rows(*this, records, slice_of(part, parts, row_bytes_, MoveRows::kPiece));
      }
      if (part > 0) {
        continue;
      }
      if (call_.out_weights != nullptr) {
        extras_.move_weights(records, staged_.weights(records));
      }
      if (call_.out_scales != nullptr) {
        extras_.move_scales(records, staged_.scales(records));
      }
    }
  }

  using Records = ArrivalRecords;

  // One arrival's row and where it must still go.
  struct Job {
    const std::byte* row = nullptr;
    std::byte* target = nullptr;  // of this lane
  };

  [[nodiscard]] __device__ __forceinline__ Job job_of(const Records& records, int i) const {
    const int lane = lane_index();
    const int num_routes = pick(records.num_routes, i);
    const int num_rows = call_.one_row ? min(num_routes, 1) : num_routes;
    const int32_t listed = pick(records.slot, i);
    const int32_t slot = lane < num_rows ? listed : -1;
    Job job;
    if (num_rows == 0) {
      return job;
    }
    const bool is_staged = kIsEarly || call_.place == DevicePlace::kStaging;
    if (is_staged) {
      job.row = staged_.rows(records, row_bytes_) + i * row_bytes_;
    } else {
      const int64_t primary = __shfl_sync(kAllLanes, slot, 0);
      job.row = call_.out_rows + primary * row_bytes_;
    }
    if (slot >= 0 && (is_staged || lane > 0)) {
      job.target = call_.out_rows + static_cast<int64_t>(slot) * row_bytes_;
    }
    return job;
  }

 private:
  // Warps that share an item, where there are fewer items than warps.
  [[nodiscard]] __device__ __forceinline__ int num_parts(int items) const {
    int parts = 1;
    while (2 * parts * items <= num_warps_ && row_bytes_ > parts * kLeastPart) {
      parts *= 2;
    }
    return parts;
  }
  static constexpr int64_t kLeastPart = 1024;

  [[nodiscard]] __device__ __forceinline__ Records load_records(int index, int items) const {
    Records records;
    if (index >= items) {
      return records;
    }
    const ChunkItem item = item_at(me_, num_sources_, index);
    records.source = item.source;
    records.chunk = item.chunk;
    records.is_there = item.chunk < num_device_chunks(setup_.tokens[item.source]);
    if (!records.is_there) {
      return records;
    }
    const auto from = static_cast<uint32_t>(item.source);
    const ChunkArrivals arrivals = arrivals_of(call_.plan, item.source, item.chunk);
    records.begin = arrivals.begin;
    records.count = arrivals.end - arrivals.begin;
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      const int64_t arrival = arrivals.begin + i;
      const bool is_inside = i < records.count;
      records.num_routes[i] = is_inside ? call_.plan.heads(from)[arrival].num_routes : 0;
      const bool is_route = is_inside && lane < call_.topk;
      const int64_t route = arrival * max_topk_ + lane;
      records.slot[i] = is_route ? call_.plan.slots(from)[route] : -1;
      if (call_.out_weights != nullptr) {
        records.k[i] = is_route ? call_.plan.origins(from)[route] & 0xff : 0;
      }
    }
    return records;
  }

  // Rows between an expert's last and the end of its block.
  __device__ void zero_padding() const {
    if (!call_.has_padding) {
      return;
    }
    const PlanView& plan = call_.plan;
    const int num_experts = static_cast<int>(me_.map.num_experts) / me_.num_ranks;
    for (int first = 0; first < num_experts; first += kWarpLanes) {
      // Lane i knows expert first + i.
      const int expert = first + lane_index();
      int32_t begin = 0;
      int32_t count = 0;
      if (expert < num_experts) {
        const int64_t rows = plan.rows_per_expert()[expert];
        begin = static_cast<int32_t>(plan.expert_begin()[expert] + rows);
        count = static_cast<int32_t>(plan.padded_rows_per_expert()[expert] - rows);
      }
      uint32_t left = __ballot_sync(kAllLanes, count > 0);
      while (left != 0) {
        const int lane = __ffs(static_cast<int>(left)) - 1;
        left &= left - 1;
        const int32_t from = __shfl_sync(kAllLanes, begin, lane);
        const int32_t rows = __shfl_sync(kAllLanes, count, lane);
        // Not always the same warps first.
        for (int row = (warp_ + (first + lane) * 37) % num_warps_; row < rows; row += num_warps_) {
          zero_row(from + row);
        }
      }
    }
  }

  __device__ __forceinline__ void zero_row(int64_t row) const {
    const int lane = lane_index();
    std::byte* out = call_.out_rows + row * row_bytes_;
    for (int64_t at = lane * 16; at < row_bytes_; at += kWarpLanes * 16) {
      ptx::store_16(out + at, uint4{0, 0, 0, 0});
    }
    if (call_.out_weights != nullptr && lane == 0) {
      call_.out_weights[row] = 0;
    }
    if (call_.out_scales != nullptr) {
      for (int64_t at = lane; at < call_.scale_bytes; at += kWarpLanes) {
        call_.out_scales[row * call_.scale_bytes + at] = std::byte{0};
      }
    }
  }

  const DispatchLaunch& call_;
  const CallSetup& setup_;
  const RankView& me_;
  int warp_;
  int num_warps_;
  int max_topk_;
  int num_sources_;
  StagedItems<kIsEarly> staged_;
  DispatchExtras extras_;
  int64_t row_bytes_;
};

struct MoveRowsVector {
  static constexpr int32_t kPiece = kVectorPiece;

  template <bool kIsEarly>
  __device__ __forceinline__ void operator()(
      const DispatchFanOut<kIsEarly>& role, const ArrivalRecords& records, const Slice& slice
  ) const {
    using Job = typename DispatchFanOut<kIsEarly>::Job;
    const Pieces& pieces = slice.pieces;
    for (int piece = 0; piece < pieces.count; ++piece) {
      const int32_t offset = slice.offset + piece * pieces.each;
      const int32_t bytes = pieces.bytes(piece);
      PieceVectors rows[kMaxChunkTokens];
      std::byte* targets[kMaxChunkTokens];
#pragma unroll
      for (int i = 0; i < kMaxChunkTokens; ++i) {
        targets[i] = nullptr;
        if (i < records.count) {
          const Job job = role.job_of(records, i);
          if (__any_sync(kAllLanes, job.target != nullptr)) {
            targets[i] = job.target;
            load_vectors(rows[i], job.row + offset, bytes);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kMaxChunkTokens; ++i) {
        for_each_target({targets[i], nullptr}, [&](std::byte* target) {
          store_vectors(target + offset, rows[i], bytes);
        });
      }
    }
  }
};

#if __CUDA_ARCH__ >= 900
struct MoveRowsBulk {
  static constexpr int32_t kPiece = kBulkPiece;

  BulkRing& ring;

  template <bool kIsEarly>
  __device__ __forceinline__ void operator()(
      const DispatchFanOut<kIsEarly>& role, const ArrivalRecords& records, const Slice& slice
  ) const {
    using Job = typename DispatchFanOut<kIsEarly>::Job;
    // What the signal made visible was read by ordinary accesses so far.
    ptx::fence_async_proxy();
    const std::byte* rows[kMaxChunkTokens];
    std::byte* targets[kMaxChunkTokens];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      rows[i] = nullptr;
      targets[i] = nullptr;
      const Job job = i < records.count ? role.job_of(records, i) : Job{};
      if (__any_sync(kAllLanes, job.target != nullptr)) {
#pragma unroll
        for (int place = 0; place <= i; ++place) {
          if (place == count) {
            rows[place] = job.row;
            targets[place] = job.target;
          }
        }
        ++count;
      }
    }
    const Pieces& pieces = slice.pieces;
    int load_job = 0;
    int load_piece = 0;
    const auto source_of = [&](int) -> RowSpan {
      const RowSpan span = {
          pick(rows, load_job) + slice.offset + load_piece * pieces.each,
          static_cast<uint32_t>(pieces.bytes(load_piece))};
      if (++load_piece == pieces.count) {
        load_piece = 0;
        ++load_job;
      }
      return span;
    };
    int job = 0;
    int piece = 0;
    const auto store = [&](int, const std::byte* data) {
      std::byte* target = pick(targets, job);
      if (target != nullptr) {
        ptx::bulk_store(
            target + slice.offset + piece * pieces.each,
            data,
            static_cast<uint32_t>(pieces.bytes(piece))
        );
      }
      if (++piece == pieces.count) {
        piece = 0;
        ++job;
      }
    };
    ring.stream(count * pieces.count, source_of, store, [](int) {});
  }
};
#endif

}  // namespace weft
