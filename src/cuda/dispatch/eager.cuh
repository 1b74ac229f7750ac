// SPDX-License-Identifier: Apache-2.0
// The fan-out role of a dispatch that makes its plan in the same launch (fused.cu): a warp waits
// for one token of one source and loads its part of the row while the plan is made, then stores it
// to the token's slots on this rank. For a token without slots it loads what an earlier call left
// in memory, and stores nothing. Before: the push role of the source (push.cuh) and the plan
// (plan/fused.cuh); after: the caller's experts.
#pragma once

#include "cuda/device/call_setup.cuh"
#include "cuda/device/row_mover.cuh"
#include "cuda/device/team.cuh"
#include "cuda/dispatch/extras.cuh"
#include "cuda/plan/fused.cuh"

namespace weft {

// Progress of the plan that other blocks make at the same time, as a block that moves rows knows
// it. It is in shared memory; a warp that moves nothing writes it.
struct SeenPlan {
  enum : uint32_t { kNotYet, kHere, kGivenUp };
  uint32_t sizes;  // CallSetup::tokens holds, and with replicas where this rank's rows go
  uint32_t slots;  // where the rows of all ranks go on this one
  uint32_t shape;  // of this rank's plan

  __device__ void clear() { sizes = slots = shape = kNotYet; }
};

// Sets the flag, by all lanes of one warp.
__device__ __forceinline__ void tell_block(uint32_t& flag, bool is_here) {
  is_here = __all_sync(kAllLanes, is_here);
  if (lane_index() == 0) {
    __threadfence_block();
    atomicExch(&flag, is_here ? SeenPlan::kHere : SeenPlan::kGivenUp);
  }
}

// All lanes of one warp wait until the flag is set. Returns false if the call is given up. The wait
// always ends, because the warp that sets the flag waits with a deadline.
__device__ __forceinline__ bool await_block(uint32_t& flag) {
  uint32_t seen = SeenPlan::kNotYet;
  if (lane_index() == 0) {
    while ((seen = atomicOr(&flag, 0U)) == SeenPlan::kNotYet) {
      __nanosleep(20);  // a guess
    }
    __threadfence_block();
  }
  __syncwarp();
  return __shfl_sync(kAllLanes, seen, 0) == SeenPlan::kHere;
}

// One warp of a block, which moves nothing, waits for the plan and tells the others.
template <bool kIsBalanced>
__device__ __forceinline__ void watch_plan(
    const PlanLaunch& call, CallSetup& setup, SeenPlan& seen
) {
  const RankView& me = call.me;
  const int rank = lane_index();
  bool is_good = true;
  if (rank < me.num_ranks && is_lost(me, rank)) {
    setup.tokens[rank] = 0;
  } else if (rank < me.num_ranks) {
    const uint64_t* from = routing_of(me, me.rank, setup.epoch, rank) + RoutingMap::kNumTokens;
    const WaitSite site = {Op::kPlan, setup.epoch, rank, WaitFor::kRouting};
    uint32_t tokens = 0;
    is_good = wait_tagged(me, from, site, ptx::load_relaxed_sys(from), tokens) &&
              tokens <= me.map.max_tokens;
    setup.tokens[rank] = static_cast<int32_t>(tokens);
  }
  if constexpr (kIsBalanced) {
    if (is_good && rank == 0) {
      is_good = await_routes(me);
    }
  }
  __syncwarp();
  tell_block(seen.sizes, is_good);
  if (is_good && rank == 0) {
    is_good = await_slots(call, setup.epoch);
  }
  __syncwarp();
  tell_block(seen.slots, is_good);
  if (is_good && rank == 0) {
    is_good = await_parts(me, setup.epoch);
  }
  __syncwarp();
  tell_block(seen.shape, is_good);
}

class EagerFanOut {
 public:
  __device__ EagerFanOut(
      const DispatchLaunch& call, const CallSetup& setup, SeenPlan& seen, RoleBlock block
  )
      : call_(call), setup_(setup), seen_(seen), me_(call.me), extras_(call) {
    warp_ = block.index + warp_in_block() * block.count;
    num_warps_ = kMoverWarps * block.count;
    row_bytes_ = call.payload.out_row_bytes();
  }

  // `mover`: a VectorMover or a BulkMover.
  template <class Mover>
  __device__ void run(Mover& mover) {
    if (!await_block(seen_.sizes)) {
      return;
    }
    const int items = num_items(me_, setup_, me_.num_ranks);
    const int parts = num_parts(items);
    // The extras of a row have a warp of their own, if there is one.
    const int all_parts =
        has_extras(call_) && (parts + 1) * items <= num_warps_ ? parts + 1 : parts;
    for (int index = warp_; index < items * all_parts; index += num_warps_) {
      const ChunkItem item = item_at(me_, me_.num_ranks, index / all_parts);
      if (item.chunk >= setup_.tokens[item.source]) {
        continue;
      }
      ArrivalRecords records;
      records.source = item.source;
      records.chunk = item.chunk;
      records.token[0] = item.chunk;
      const auto slot = me_.map.signals().dispatch(item.source, item.chunk);
      const WaitSite site = {Op::kDispatch, setup_.epoch, item.source, WaitFor::kRows};
      if (!wait_reached_warp(me_, signal_of(me_, me_.rank, slot), setup_.epoch, site)) {
        return;
      }
      const int part = index % all_parts;
      if (part == parts) {
        find_slots(records);
      } else {
        const Slice slice = slice_of(part, parts, row_bytes_, Mover::kPiece);
        if (!move_row(*this, records, slice, mover)) {
          return;
        }
      }
      if (part == all_parts - 1) {
        move_extras(records);
      }
    }
    if ((call_.has_padding || call_.out_experts != nullptr) && await_block(seen_.shape)) {
      for (int part = warp_; part < num_padding_parts(call_); part += num_warps_) {
        zero_padding(call_, part);
      }
      clear_experts(call_, warp_, num_warps_);
    }
  }

  // Waits for the slots and fills them in: none if the call is given up, none beyond the output's
  // room.
  __device__ __forceinline__ void find_slots(ArrivalRecords& records) const {
    int2 entry = {-1, 0};
    if (await_block(seen_.slots) && lane_index() < call_.topk) {
      const EagerSlot* slots = eager_slots_of(me_, static_cast<uint32_t>(records.source));
      entry = reinterpret_cast<const int2*>(slots + records.chunk * call_.topk)[lane_index()];
      entry.x = entry.x < call_.num_rows ? entry.x : -1;
    }
    records.count = 1;
    records.num_routes[0] = __popc(__ballot_sync(kAllLanes, entry.x >= 0));
    records.slot[0] = entry.x;
    records.origin[0] = entry.y;
  }

  [[nodiscard]] __device__ __forceinline__ const std::byte* row(const ArrivalRecords& records
  ) const {
    return own() + me_.map.eager_rows_offset(setup_.epoch) + place(records) * row_bytes_;
  }

  // Returns where this lane stores the row; null for nowhere.
  [[nodiscard]] __device__ __forceinline__ std::byte* target(const ArrivalRecords& records) const {
    const bool is_one = !call_.one_row || lane_index() == 0;
    return is_one && records.slot[0] >= 0 ? call_.out_rows + records.slot[0] * row_bytes_ : nullptr;
  }

 private:
  // Returns how many warps share an item where there are fewer items than warps.
  [[nodiscard]] __device__ __forceinline__ int num_parts(int items) const {
    constexpr int64_t kLeastPart = 1024;  // bytes; a guess
    int parts = 1;
    while (2 * parts * items <= num_warps_ && row_bytes_ > parts * kLeastPart) {
      parts *= 2;
    }
    return parts;
  }

  __device__ __forceinline__ void move_extras(const ArrivalRecords& records) const {
    const DeviceControlMap& map = me_.map;
    const auto source = static_cast<uint32_t>(records.source);
    const std::byte* weights = own() + map.eager_weights_offset(setup_.epoch, source);
    const std::byte* scales = own() + map.eager_scales_offset(setup_.epoch);
    extras_.move(
        records,
        reinterpret_cast<const float*>(weights) + records.chunk * static_cast<int>(map.max_topk),
        scales + place(records) * call_.payload.staged_scale_bytes()
    );
  }

  [[nodiscard]] __device__ __forceinline__ const std::byte* own() const {
    return control_of(me_, me_.rank);
  }
  [[nodiscard]] __device__ __forceinline__ int64_t place(const ArrivalRecords& records) const {
    return static_cast<int64_t>(records.source) * me_.map.max_tokens + records.chunk;
  }

  const DispatchLaunch& call_;
  const CallSetup& setup_;
  SeenPlan& seen_;
  const RankView& me_;
  DispatchExtras extras_;
  int warp_;
  int num_warps_;
  int64_t row_bytes_;
};

// Moves one row, and calls find_slots(records) once it has begun to load. Returns false if the call
// is given up.
__device__ __forceinline__ bool move_row(
    const EagerFanOut& role,
    ArrivalRecords& records,
    const Slice& slice,
    const VectorMover& /*mover*/
) {
  const std::byte* row = role.row(records) + slice.offset;
  for (int piece = 0; piece < max(slice.pieces.count, 1); ++piece) {
    const int32_t offset = piece * slice.pieces.each;
    const int32_t bytes = slice.pieces.bytes(piece);
    PieceVectors vectors;
    load_vectors(vectors, row + offset, bytes);
    if (piece == 0) {
      role.find_slots(records);
    }
    for_each_target({role.target(records), nullptr}, [&](std::byte* target) {
      store_vectors(target + slice.offset + offset, vectors, bytes);
    });
  }
  return true;
}
__device__ __forceinline__ bool move_row(
    const EagerFanOut& role, ArrivalRecords& records, const Slice& slice, BulkRing& ring
) {
  // So far only ordinary accesses see what the signal made visible.
  ptx::fence_async_proxy();
  const Pieces& pieces = slice.pieces;
  const std::byte* row = role.row(records) + slice.offset;
  std::byte* target = nullptr;
  const auto source_of = [&](int piece) -> RowSpan {
    return {row + piece * pieces.each, static_cast<uint32_t>(pieces.bytes(piece))};
  };
  const auto store = [&](int piece, const std::byte* data) {
    if (piece == 0) {
      role.find_slots(records);
      target = role.target(records);
    }
    if (target != nullptr) {
      const auto bytes = static_cast<uint32_t>(pieces.bytes(piece));
      ptx::bulk_store(target + slice.offset + piece * pieces.each, data, bytes);
    }
  };
  return ring.stream(pieces.count, source_of, store, [](int) {});
}

}  // namespace weft
