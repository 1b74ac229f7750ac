// SPDX-License-Identifier: Apache-2.0
// The fan-out role of dispatch: a warp waits for the signal of one chunk of one source, then copies
// each arrival to its other slots (from staging: to all of them) and puts weights and scale rows
// where they belong. Padding is zeroed before the first wait.
#pragma once

#include "kernels/launch.hpp"
#include "kernels/quantise.cuh"
#include "kernels/row_mover.cuh"
#include "kernels/team.cuh"

namespace weft {

class DispatchFanOut {
 public:
  __device__ DispatchFanOut(const DispatchLaunch& call, const CallSetup& setup)
      : call_(call), setup_(setup), me_(call.me) {
    warp_ = static_cast<int>(blockIdx.x) - call.num_push + warp_in_block() * call.num_fan_out;
    num_warps_ = kMoverWarps * call.num_fan_out;
    max_topk_ = static_cast<int>(call.plan.map.max_topk);
    row_bytes_ = call.quantise == Quantise::kNone ? call.row_bytes : call.row_bytes / 2;
  }

  // `mover(source row, targets)` moves one row.
  template <class MoveRows>
  __device__ void run(const MoveRows& move_rows) {
    zero_padding();
    const int items = num_items(me_, setup_);
    const bool has_extras = call_.out_weights != nullptr || call_.out_scales != nullptr;
    for (int index = warp_; index < items; index += num_warps_) {
      const ChunkItem item = item_at(me_, index);
      if (item.chunk >= num_device_chunks(setup_.tokens[item.source])) {
        continue;
      }
      if (item.source == me_.rank && !has_extras) {
        continue;  // the push role wrote every slot
      }
      const ChunkArrivals arrivals = arrivals_of(call_.plan, item.source, item.chunk);
      const auto slot = me_.map.signals().dispatch(
          static_cast<uint32_t>(item.source), static_cast<uint32_t>(item.chunk)
      );
      const WaitSite site = {DeviceOp::kDispatch, setup_.epoch, item.source, WaitFor::kRows};
      if (!wait_reached_warp(me_, signal_of(me_, me_.rank, slot), setup_.epoch, site)) {
        return;
      }
      move_rows(*this, item.source, arrivals);
      if (has_extras) {
        for (int arrival = arrivals.begin; arrival < arrivals.end; ++arrival) {
          move_extras(item.source, arrival);
        }
      }
    }
  }

  // One arrival's row and where it must still go.
  struct Job {
    const std::byte* row = nullptr;
    std::byte* target = nullptr;  // of this lane
  };

  [[nodiscard]] __device__ __forceinline__ Job job_of(int source, int arrival) const {
    const ArrivalHead head = call_.plan.heads(static_cast<uint32_t>(source))[arrival];
    const int lane = lane_index();
    const int num_rows = call_.one_row ? min(head.num_routes, 1) : head.num_routes;
    int32_t slot = -1;
    if (lane < num_rows) {
      slot = call_.plan.slots(static_cast<uint32_t>(source)
      )[static_cast<int64_t>(arrival) * max_topk_ + lane];
    }
    Job job;
    if (source == me_.rank || num_rows == 0) {
      return job;
    }
    const bool is_staged = call_.place == DevicePlace::kStaging;
    if (is_staged) {
      const int64_t row = call_.plan.received_base()[source] + arrival;
      job.row = call_.staged_rows + row * row_bytes_;
    } else {
      const int64_t primary = __shfl_sync(kAllLanes, slot, 0);
      job.row = call_.out_rows + primary * row_bytes_;
    }
    if (slot >= 0 && (is_staged || lane > 0)) {
      job.target = call_.out_rows + static_cast<int64_t>(slot) * row_bytes_;
    }
    return job;
  }

  [[nodiscard]] __device__ __forceinline__ int64_t row_bytes() const { return row_bytes_; }

 private:
  // Rows between an expert's last and the end of its block.
  __device__ void zero_padding() const {
    if (call_.one_row) {
      return;
    }
    const PlanView& plan = call_.plan;
    const int num_experts = static_cast<int>(me_.map.num_experts) / me_.num_ranks;
    for (int expert = 0; expert < num_experts; ++expert) {
      const int64_t begin = plan.expert_begin()[expert];
      const int64_t end = begin + plan.padded_rows_per_expert()[expert];
      int64_t row = begin + plan.rows_per_expert()[expert] +
                    (warp_ + expert * 37) % num_warps_;  // not always the same warps first
      for (; row < end; row += num_warps_) {
        zero_row(row);
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

  __device__ __forceinline__ void move_extras(int source, int arrival) const {
    const auto from = static_cast<uint32_t>(source);
    const int num_routes = call_.plan.heads(from)[arrival].num_routes;
    const int lane = lane_index();
    const int64_t first = static_cast<int64_t>(arrival) * max_topk_;
    int32_t slot = -1;
    int32_t k = -1;
    if (lane < num_routes) {
      slot = call_.plan.slots(from)[first + lane];
      k = call_.plan.origins(from)[first + lane] & 0xff;
    }
    if (num_routes == 0) {
      return;
    }
    if (call_.out_weights != nullptr) {
      const float* weights =
          reinterpret_cast<const float*>(control_of(me_, me_.rank) + me_.map.weights_offset(from));
      if (call_.one_row) {
        const uint32_t kept =
            __reduce_or_sync(kAllLanes, k >= 0 ? 1U << static_cast<uint32_t>(k) : 0U);
        const int64_t row = __shfl_sync(kAllLanes, slot, 0);
        if (lane < call_.topk) {
          const bool is_kept = (kept >> static_cast<uint32_t>(lane) & 1U) != 0;
          call_.out_weights[row * call_.topk + lane] =
              is_kept ? load_fresh(weights + first + lane) : 0.0F;
        }
      } else if (slot >= 0) {
        call_.out_weights[slot] = load_fresh(weights + first + k);
      }
    }
    if (call_.out_scales != nullptr) {
      const int64_t row = call_.plan.received_base()[source] + arrival;
      const std::byte* scales = call_.staged_scales + row * staged_scale_bytes(call_.scale_bytes);
      const bool is_target = call_.one_row ? lane == 0 : slot >= 0;
      std::byte* target =
          is_target ? call_.out_scales + static_cast<int64_t>(slot) * call_.scale_bytes : nullptr;
      for_each_target({target, nullptr}, [&](std::byte* to) {
        copy_bytes_warp(to, scales, call_.scale_bytes);
      });
    }
  }

  // A peer wrote it during this kernel: never from a cache that could be older.
  [[nodiscard]] static __device__ __forceinline__ float load_fresh(const float* address) {
    return *const_cast<const volatile float*>(address);
  }

  const DispatchLaunch& call_;
  const CallSetup& setup_;
  const RankView& me_;
  int warp_;
  int num_warps_;
  int max_topk_;
  int64_t row_bytes_;
};

struct MoveRowsVector {
  __device__ __forceinline__ void operator()(
      const DispatchFanOut& role, int source, const ChunkArrivals& arrivals
  ) const {
    const Pieces pieces = cut_row(role.row_bytes(), kVectorPiece);
    for (int arrival = arrivals.begin; arrival < arrivals.end; ++arrival) {
      const DispatchFanOut::Job job = role.job_of(source, arrival);
      if (!__any_sync(kAllLanes, job.target != nullptr)) {
        continue;
      }
      for (int piece = 0; piece < pieces.count; ++piece) {
        move_piece(job.row, piece * pieces.each, pieces.bytes(piece), {job.target, nullptr});
      }
    }
  }
};

#if __CUDA_ARCH__ >= 900
struct MoveRowsBulk {
  BulkRing& ring;

  __device__ __forceinline__ void operator()(
      const DispatchFanOut& role, int source, const ChunkArrivals& arrivals
  ) const {
    // What the signal made visible was read by ordinary accesses so far.
    ptx::fence_async_proxy();
    constexpr int kMost = 4;  // chunk_tokens() at most
    DispatchFanOut::Job jobs[kMost];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (arrivals.begin + i < arrivals.end) {
        const DispatchFanOut::Job job = role.job_of(source, arrivals.begin + i);
        if (__any_sync(kAllLanes, job.target != nullptr)) {
          // Kept in registers: no index that is known at run time alone.
#pragma unroll
          for (int place = 0; place <= i; ++place) {
            if (place == count) {
              jobs[place] = job;
            }
          }
          ++count;
        }
      }
    }
    const Pieces pieces = cut_row(role.row_bytes(), kBulkPiece);
    const auto job_at = [&](int index) {
      DispatchFanOut::Job job = jobs[0];
#pragma unroll
      for (int place = 1; place < kMost; ++place) {
        job = index == place ? jobs[place] : job;
      }
      return job;
    };
    const auto source_of = [&](int unit) -> RowSpan {
      const int piece = unit % pieces.count;
      return {
          job_at(unit / pieces.count).row + piece * pieces.each,
          static_cast<uint32_t>(pieces.bytes(piece))};
    };
    const auto store = [&](int unit, const std::byte* data) {
      const int piece = unit % pieces.count;
      std::byte* target = job_at(unit / pieces.count).target;
      if (target != nullptr) {
        ptx::bulk_store(
            target + piece * pieces.each, data, static_cast<uint32_t>(pieces.bytes(piece))
        );
      }
    };
    ring.stream(count * pieces.count, source_of, store, [](int) {});
  }
};
#endif

}  // namespace weft
