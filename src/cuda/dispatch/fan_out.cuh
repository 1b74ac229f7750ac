// SPDX-License-Identifier: Apache-2.0
// The fan-out role of dispatch: a warp waits for one chunk of one source, then copies each arrival
// to its other slots (from staging: to all of them) and puts weights and scale rows where they
// belong (extras.cuh). Padding is zeroed before the first wait. dispatch.cu and
// copy_engines/dispatch.cu run it. Before: the push role of the source (push.cuh); after: the
// caller's experts.
#pragma once

#include "cuda/device/row_mover.cuh"
#include "cuda/device/team.cuh"
#include "cuda/dispatch/extras.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// Items that sources have sent, where they lie and when they are here: in this rank's staging,
// packed by arrival, except for rows that sources wrote to their primary slots; or, with `kCopied`,
// where copy engines have brought them. Copied items are all here when the kernel's roles begin.
template <bool kCopied>
class ArrivedItems {
 public:
  __device__ ArrivedItems(const DispatchLaunch& call, const CallSetup& setup)
      : call_(call), setup_(setup) {}

  // Wait, by one lane or all lanes of a warp, for the item. Return false if the call is given up.
  [[nodiscard]] __device__ __forceinline__ bool wait(int source, int chunk) const {
    return kCopied || wait_reached(call_.me, signal(source, chunk), setup_.epoch, site_of(source));
  }
  [[nodiscard]] __device__ __forceinline__ bool wait_warp(int source, int chunk) const {
    return kCopied ||
           wait_reached_warp(call_.me, signal(source, chunk), setup_.epoch, site_of(source));
  }

  // Returns whether the items have rows, too.
  [[nodiscard]] __device__ __forceinline__ bool has_rows() const {
    return kCopied || call_.place == Place::kStaging;
  }

  // The next three return the address of the item's first arrival; the others lie behind it.
  [[nodiscard]] __device__ __forceinline__ const std::byte* rows(
      const ArrivalRecords& records, int64_t row_bytes
  ) const {
    return kCopied ? setup_.rows[records.source] + records.begin * row_bytes
                   : call_.staged_rows + place(records) * row_bytes;
  }

  [[nodiscard]] __device__ __forceinline__ const std::byte* scales(const ArrivalRecords& records
  ) const {
    return kCopied ? setup_.scales[records.source] + records.begin * call_.copied.rows.scale_bytes
                   : call_.staged_scales + place(records) * call_.payload.staged_scale_bytes();
  }

  [[nodiscard]] __device__ __forceinline__ const float* weights(const ArrivalRecords& records
  ) const {
    const RankView& me = call_.me;
    const float* all = setup_.weights[records.source];
    if constexpr (!kCopied) {
      const uint64_t offset = me.map.weights_offset(static_cast<uint32_t>(records.source));
      all = reinterpret_cast<const float*>(control_of(me, me.rank) + offset);
    }
    return all + static_cast<int64_t>(records.begin) * me.map.max_topk;
  }

 private:
  [[nodiscard]] __device__ __forceinline__ const uint32_t* signal(int source, int chunk) const {
    const RankView& me = call_.me;
    return signal_of(me, me.rank, me.map.signals().dispatch(source, chunk));
  }
  [[nodiscard]] __device__ __forceinline__ WaitSite site_of(int source) const {
    return {Op::kDispatch, setup_.epoch, source, WaitFor::kRows};
  }
  [[nodiscard]] __device__ __forceinline__ int64_t place(const ArrivalRecords& records) const {
    return setup_.received_base[records.source] + records.begin;
  }

  const DispatchLaunch& call_;
  const CallSetup& setup_;
};

inline constexpr int kJoining = -1;  // number of a block

// With `kCopied` the call goes by copy engines (copy_engines/dispatch.cu).
template <bool kCopied>
class DispatchFanOut {
 public:
  // `block` counts those that have this role from the start. Pushing blocks join later, as
  // kJoining.
  __device__ DispatchFanOut(const DispatchLaunch& call, const CallSetup& setup, RoleBlock block)
      : call_(call), setup_(setup), me_(call.me), items_(call, setup) {
    is_joining_ = block.index == kJoining;
    warp_ = block.index + warp_in_block() * block.count;
    num_warps_ = kMoverWarps * block.count;
    max_topk_ = static_cast<int>(call.plan.map.max_topk);
    // The push role has written every slot of this rank's own tokens.
    num_sources_ = has_extras(call) ? me_.num_ranks : me_.num_ranks - 1;
    row_bytes_ = call.payload.out_row_bytes();
  }

  // `mover`: a VectorMover or a BulkRing.
  template <class Mover>
  __device__ void run(Mover& mover) {
    const int items = num_items(me_, setup_, num_sources_);
    if (!is_joining_) {
      clear_experts(call_, warp_, num_warps_);
      if (warp_ == 0) {
        tell_counts(call_);
      }
    }
    if (!kCopied && call_.one_row && !items_.has_rows()) {
      has_extras(call_) ? add_to_rows(items) : wait_for_all(items);
      return;
    }
    const DispatchExtras extras(call_);
    // Padding comes first, which waits for nothing.
    const int padding = num_padding_parts(call_);
    int index = is_joining_ ? next_item(0) : warp_;
    Records next = load_records(index - padding, items, lane_index());
    while (index < padding + items) {
      const int taken = index;
      const Records records = next;
      index = next_item(index);
      next = load_records(index - padding, items, lane_index());
      if (taken < padding) {
        zero_padding(call_, taken);
        continue;
      }
      if (!records.is_there) {
        continue;
      }
      if (!items_.wait_warp(records.source, records.chunk)) {
        return;
      }
      if (records.source != me_.rank && !move_rows(*this, records, mover)) {
        return;
      }
      if (has_extras(call_)) {
        extras.move(records, items_.weights(records), items_.scales(records));
      }
    }
  }

  [[nodiscard]] __device__ __forceinline__ int64_t row_bytes() const { return row_bytes_; }

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
    const bool is_staged = items_.has_rows();
    if (is_staged) {
      job.row = items_.rows(records, row_bytes_) + i * row_bytes_;
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
  // Returns the next item. The first go to the warps that have the role from the start; any free
  // warp takes one of the others.
  [[nodiscard]] __device__ __forceinline__ int next_item(int index) const {
    if constexpr (kCopied) {
      return index + num_warps_;
    }
    uint32_t taken = 0;
    if (lane_index() == 0) {
      taken = atomicAdd(&me_.local->grid, 1U);
    }
    return num_warps_ + static_cast<int>(__shfl_sync(kAllLanes, taken, 0));
  }

  // Adds the extras of rows that are at their places already. Most time goes into waiting for
  // memory, so a warp has several items at a time, each on as many lanes as a token has choices, or
  // some more.
  __device__ void add_to_rows(int items) {
    constexpr int kLeastLanes = 8;  // a guess
    int lanes = kLeastLanes;
    while (lanes < call_.topk) {
      lanes *= 2;
    }
    const DispatchExtras extras(call_, lanes);
    const int lane = lane_index() & (lanes - 1);
    const int at_a_time = kWarpLanes / lanes;
    const int part = lane_index() / lanes;
    int index = is_joining_ ? next_item(0) : warp_;
    Records next = load_records(index * at_a_time + part, items, lane);
    while (index * at_a_time < items) {
      const Records records = next;
      index = next_item(index);
      next = load_records(index * at_a_time + part, items, lane);
      const bool is_waiting = lane == 0 && records.is_there;
      const bool is_here = !is_waiting || items_.wait(records.source, records.chunk);
      if (!__all_sync(kAllLanes, is_here)) {
        return;
      }
      __syncwarp();  // what one lane acquired is every lane's now
      extras.move(records, items_.weights(records), items_.scales(records));
    }
  }

  // Waits until all items are here, where they have no extras: the call must not end before. A lane
  // waits for one item at a time.
  __device__ __forceinline__ void wait_for_all(int items) const {
    const int lanes = num_warps_ * kWarpLanes;
    for (int i = warp_ * kWarpLanes + lane_index(); !is_joining_ && i < items; i += lanes) {
      const ChunkItem item = item_at(me_, num_sources_, i);
      if (item.chunk < num_device_chunks(setup_.tokens[item.source]) &&
          !items_.wait(item.source, item.chunk)) {
        return;
      }
    }
  }

  // Returns the records of item `index` that `lane` of its lanes holds.
  [[nodiscard]] __device__ __forceinline__ Records
  load_records(int index, int items, int lane) const {
    Records records;
    if (index < 0 || index >= items) {
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
#pragma unroll
    for (int i = 0; i < kMaxChunkTokens; ++i) {
      const int64_t arrival = arrivals.begin + i;
      const bool is_inside = i < records.count;
      records.num_routes[i] = is_inside ? call_.plan.heads(from)[arrival].num_routes : 0;
      if (call_.out_sources != nullptr) {
        records.token[i] = is_inside ? call_.plan.heads(from)[arrival].token : 0;
      }
      const bool is_route = is_inside && lane < call_.topk;
      const int64_t route = arrival * max_topk_ + lane;
      records.slot[i] = is_route ? call_.plan.slots(from)[route] : -1;
      if (call_.out_weights != nullptr || call_.out_experts != nullptr) {
        records.origin[i] = is_route ? call_.plan.origins(from)[route] : 0;
      }
    }
    return records;
  }

  const DispatchLaunch& call_;
  const CallSetup& setup_;
  const RankView& me_;
  bool is_joining_;
  int warp_;  // among those that have the role from the start
  int num_warps_;
  int max_topk_;
  int num_sources_;
  ArrivedItems<kCopied> items_;
  int64_t row_bytes_;
};

// Copies the rows of one item. Returns false if the call is given up.
template <class Role>
__device__ __forceinline__ bool
move_rows(const Role& role, const ArrivalRecords& records, const VectorMover& /*mover*/) {
  using Job = typename Role::Job;
  const Pieces pieces = cut_row(role.row_bytes(), kVectorPiece);
  for (int piece = 0; piece < pieces.count; ++piece) {
    const int32_t offset = piece * pieces.each;
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
  return true;
}
template <class Role>
__device__ __forceinline__ bool move_rows(
    const Role& role, const ArrivalRecords& records, BulkRing& ring
) {
  using Job = typename Role::Job;
  // So far only ordinary accesses see what the signal made visible.
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
  const Pieces pieces = cut_row(role.row_bytes(), kBulkPiece);
  int load_job = 0;
  int load_piece = 0;
  const auto source_of = [&](int) -> RowSpan {
    const RowSpan span = {
        pick(rows, load_job) + load_piece * pieces.each,
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
          target + piece * pieces.each, data, static_cast<uint32_t>(pieces.bytes(piece))
      );
    }
    if (++piece == pieces.count) {
      piece = 0;
      ++job;
    }
  };
  return ring.stream(count * pieces.count, source_of, store, [](int) {});
}

}  // namespace weft
