// SPDX-License-Identifier: Apache-2.0
// How one warp copies pieces of rows from one place to several: through registers (load_vectors,
// store_vectors), or through shared memory with the bulk copy engine (BulkRing). dispatch/push.cuh,
// dispatch/fan_out.cuh and dispatch/eager.cuh move all their rows with it. team.cuh says which
// warps share a row.
#pragma once

#include "cuda/device/call_setup.cuh"
#include "cuda/device/ptx/bulk.cuh"
#include "cuda/device/ptx/memory.cuh"

namespace weft {

// The size of register arrays that are indexed by token or arrival of a chunk. A chunk has at most
// kLongChunkTokens.
inline constexpr int kMaxChunkTokens = 4;

// Returns values[index]. A register array indexed by a number that only run time knows would move
// to local memory.
template <class T>
__device__ __forceinline__ T pick(const T (&values)[kMaxChunkTokens], int index) {
  T value = values[0];
#pragma unroll
  for (int i = 1; i < kMaxChunkTokens; ++i) {
    value = index == i ? values[i] : value;
  }
  return value;
}

// How a row is cut: into pieces of equal size, so that the last one is not small.
struct Pieces {
  int32_t row_bytes = 0;
  int32_t each = 0;  // a multiple of 16
  int32_t count = 0;

  [[nodiscard]] __device__ __forceinline__ int32_t bytes(int piece) const {
    const int32_t left = row_bytes - piece * each;
    return left < each ? left : each;
  }
};

// Cuts a row into `wanted` pieces, or into fewer if it is short.
__device__ __forceinline__ Pieces cut_row_into(int64_t row_bytes, int32_t wanted) {
  const auto bytes = static_cast<int32_t>(row_bytes);
  const int32_t each = ((bytes + wanted - 1) / wanted + 15) / 16 * 16;
  return {bytes, each, (bytes + each - 1) / each};
}

__device__ __forceinline__ Pieces cut_row(int64_t row_bytes, int32_t most) {
  return cut_row_into(row_bytes, (static_cast<int32_t>(row_bytes) + most - 1) / most);
}

struct RowSpan {
  const std::byte* data;
  uint32_t bytes;
};

// Addresses that one row goes to: up to two per lane, null for none.
struct Targets {
  std::byte* first = nullptr;
  std::byte* second = nullptr;
};

// Calls store(target) for every target of the warp, in turn on all lanes.
template <class Store>
__device__ __forceinline__ void for_each_target(const Targets& targets, const Store& store) {
  const auto visit = [&](std::byte* mine) {
    uint32_t left = __ballot_sync(kAllLanes, mine != nullptr);
    while (left != 0) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      const auto target = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), lane);
      store(reinterpret_cast<std::byte*>(target));
    }
  };
  visit(targets.first);
  visit(targets.second);
}

// Returns the weight of a token's route `lane` as the caller gave it: by k, or for a map by expert.
// 0 for a lane without a route.
template <class Launch>
__device__ __forceinline__ float given_weight(
    const Launch& call, const float* weights, int64_t token
) {
  const int lane = lane_index();
  if (lane >= call.topk) {
    return 0.0F;
  }
  if (!call.from_map) {
    return weights[token * call.topk + lane];
  }
  const int32_t expert = call.plan.route_expert()[token * call.plan.map.max_topk + lane];
  return expert < 0 ? 0.0F
                    : weights[token * call.me.map.num_experts + call.plan.chosen_expert(expert)];
}

// Stores a token's weights, held as above, at every lane's `mine`; null: nowhere.
__device__ __forceinline__ void store_weights(float* mine, float weight, int topk) {
  for_each_target({reinterpret_cast<std::byte*>(mine), nullptr}, [&](std::byte* target) {
    if (lane_index() < topk) {
      reinterpret_cast<float*>(target)[lane_index()] = weight;
    }
  });
}

inline constexpr int kVectorLoads = 4;  // of 16 bytes, in flight per lane and row; a guess
inline constexpr int32_t kVectorPiece = kVectorLoads * kWarpLanes * 16;

// A warp's piece of a row in registers.
struct PieceVectors {
  uint4 bits[kVectorLoads];
};

__device__ __forceinline__ void load_vectors(
    PieceVectors& piece, const std::byte* data, int32_t bytes
) {
#pragma unroll
  for (int i = 0; i < kVectorLoads; ++i) {
    const int at = (i * kWarpLanes + lane_index()) * 16;
    if (at < bytes) {
      piece.bits[i] = ptx::load_16(data + at);
    }
  }
}

__device__ __forceinline__ void store_vectors(
    std::byte* data, const PieceVectors& piece, int32_t bytes
) {
#pragma unroll
  for (int i = 0; i < kVectorLoads; ++i) {
    const int at = (i * kWarpLanes + lane_index()) * 16;
    if (at < bytes) {
      ptx::store_16(data + at, piece.bits[i]);
    }
  }
}

// The three numbers are guesses. 8 warps (kMoverWarps) with these stages take 192 KiB of the 227
// KiB of shared memory that a block may have from compute capability 9.0 on.
inline constexpr int kBulkStages = 6;        // pieces in shared memory, per warp
inline constexpr int kBulkAhead = 3;         // of these, how many are being loaded
inline constexpr int32_t kBulkPiece = 4096;  // bytes

// Does the slow part of wait_barrier(), which is called in many places.
__device__ __noinline__ inline bool await_barrier(
    const RankView& me, Op op, uint64_t* barrier, uint32_t parity
) {
  constexpr uint64_t kTimes = 3;
  Patience patience(ptx::clock_now());
  while (!ptx::try_wait_barrier(barrier, parity)) {
    if (patience.look(ptx::clock_now(), me.look_ns) > kTimes * me.timeout_ns) {
      raise_timeout(me, {op, current_epoch(me), me.rank, WaitFor::kStage}, parity ^ 1U, parity);
      return false;
    }
  }
  return true;
}

// Waits, by every lane of a warp, until a phase of a barrier in shared memory is complete. It comes
// unless arrivals are miscounted: a thread that waits for a peer before it arrives gives up first.
// Returns false, with a fault, after 3 deadlines; the caller then leaves its role.
__device__ __forceinline__ bool wait_barrier(
    const RankView& me, Op op, uint64_t* barrier, uint32_t parity
) {
  return ptx::try_wait_barrier(barrier, parity) || await_barrier(me, op, barrier, parity);
}

// A warp's ring of pieces in shared memory. Lane 0 loads; every lane stores, and counts its own
// groups of bulk stores.
class BulkRing {
 public:
  __device__ BulkRing(const RankView& me, std::byte* stages, uint64_t* full)
      : me_(me), stages_(stages), full_(full) {
    if (lane_index() == 0) {
      for (int stage = 0; stage < kBulkStages; ++stage) {
        ptx::init_barrier(full + stage);
      }
      ptx::publish_barriers();
    }
    __syncwarp();
  }

  // Works on the units [0, count): loads source(u) ahead of time, then calls store(u, piece in
  // shared memory), which issues bulk stores on any lanes, and after(u). Returns false if the call
  // is given up.
  template <class Source, class Store, class After>
  __device__ __forceinline__ bool stream(
      int count, const Source& source, const Store& store, const After& after
  ) {
    ptx::wait_stores_read<kBulkStages - kBulkAhead>();
    __syncwarp();
    int loaded = 0;
    for (; loaded < kBulkAhead && loaded < count; ++loaded) {
      load(source(loaded));
    }
    for (int unit = 0; unit < count; ++unit) {
      const uint32_t stage = stored_ % kBulkStages;
      const uint32_t parity = stored_ / kBulkStages % 2;
      if (!wait_barrier(me_, Op::kDispatch, full_ + stage, parity)) {
        return false;
      }
      store(unit, stages_ + stage * kBulkPiece);
      ptx::commit_stores();
      ++stored_;
      if (loaded < count) {
        ptx::wait_stores_read<kBulkStages - kBulkAhead>();
        __syncwarp();
        load(source(loaded));
        ++loaded;
      }
      after(unit);
    }
    return true;
  }

 private:
  template <class SpanOf>
  __device__ __forceinline__ void load(const SpanOf& span) {
    const uint32_t stage = loaded_++ % kBulkStages;
    if (lane_index() == 0) {
      ptx::bulk_load(stages_ + stage * kBulkPiece, span.data, span.bytes, full_ + stage);
    }
  }

  const RankView& me_;
  std::byte* stages_;
  uint64_t* full_;
  uint32_t loaded_ = 0;
  uint32_t stored_ = 0;
};

}  // namespace weft
