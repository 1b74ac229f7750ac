// SPDX-License-Identifier: Apache-2.0
// Places replicas, by one block: plan/balance/place.cpp with a warp for each limit of a round, and
// one to even out the result. After: share_out.cuh.
//
// A step of an attempt reads registers, where lane r has the load of rank r (for more than 32 ranks
// also of r + 32), and the warp's own part of shared memory, so that a replica costs four
// reductions over the warp, two at a time, and no wait for other warps.
#pragma once

#include <cstdint>

#include "cuda/device/lanes.cuh"
#include "cuda/plan/balance/launch.hpp"
#include "cuda/plan/balance/pour.cuh"
#include "cuda/plan/balance/ranks.cuh"
#include "plan/balance/search.hpp"

namespace weft {

inline constexpr int kPlaceWarps = LimitSearch::kProbes;
inline constexpr int kPlaceThreads = kPlaceWarps * kWarpLanes;
inline constexpr int32_t kMostRows = 0x7fffffff;

// Placement that an attempt leaves behind.
struct PlacedRows {
  int32_t* masters = nullptr;   // [num_experts] rows that stay at the master
  int32_t* experts = nullptr;   // [num_ranks, replicas] of each replica, -1: none
  int32_t* replicas = nullptr;  // [num_ranks, replicas] rows of each
};

// Dynamic shared memory: rows of all experts [num_experts], then PlacedRows of each warp.
WEFT_HD inline int placed_words(const PhysicalExperts& shape) {
  return shape.num_experts + 2 * shape.num_ranks * shape.replicas;
}
WEFT_HD inline int place_shared_bytes(const PhysicalExperts& shape) {
  return static_cast<int>(sizeof(int32_t)) *
         (shape.num_experts + kPlaceWarps * placed_words(shape));
}

__device__ inline PlacedRows placed_rows(
    const PhysicalExperts& shape, int32_t* all_rows, int warp
) {
  PlacedRows placed;
  placed.masters = all_rows + shape.num_experts + warp * placed_words(shape);
  placed.experts = placed.masters + shape.num_experts;
  placed.replicas = placed.experts + shape.num_ranks * shape.replicas;
  return placed;
}

// Returns `rows` rounded down to whole blocks.
__device__ __forceinline__ int32_t in_blocks(const BalanceLaunch& call, int32_t rows) {
  return call.block_rows > 1 ? rows - rows % call.block_rows : rows;
}

// Returns the fewest rows of a replica.
__device__ __forceinline__ int32_t least_rows(const BalanceLaunch& call) {
  const int64_t rows = int64_t{call.min_rows} + call.block_rows - 1;
  return in_blocks(call, static_cast<int32_t>(min(rows, int64_t{kMostRows})));
}

// Tries, by all lanes of a warp, to keep `limit`. `load`: rows of each rank without replicas, -1
// beyond the ranks. Returns the rows of the busiest rank, or -1 if the limit cannot be kept.
template <int kPerLane>
__device__ inline int32_t try_limit(
    const BalanceLaunch& call,
    uint32_t lost,
    int32_t limit,
    OfRanks<kPerLane> load,
    const PlacedRows& placed
) {
  const int num_local = call.shape.num_local();
  const int32_t min_rows = least_rows(call);
  OfRanks<kPerLane> used;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    used.of[k] = is_lost_rank(lost, used.rank(k)) ? call.shape.replicas : 0;
  }
  while (true) {
    int32_t most = -1;
    int32_t least = kMostRows;
    OfRanks<kPerLane> open;  // load of the ranks with a free place and room
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const bool is_open =
          load.of[k] >= 0 && used.of[k] < call.shape.replicas && limit - load.of[k] >= min_rows;
      open.of[k] = is_open ? load.of[k] : kMostRows;
      most = max(most, load.of[k]);
      least = min(least, open.of[k]);
    }
    most = __reduce_max_sync(kAllLanes, most);
    least = __reduce_min_sync(kAllLanes, least);
    if (most <= limit) {
      return most;
    }
    if (least == kMostRows) {
      return -1;
    }
    const int from = lowest_rank<kPerLane>([&](int k) { return load.of[k] == most; });
    const int to = lowest_rank<kPerLane>([&](int k) { return open.of[k] == least; });

    int32_t largest = -1;
    int32_t expert = kMostRows;
#pragma unroll 1  // mostly once
    for (int i = lane_index(); i < num_local; i += kWarpLanes) {
      const int32_t rows = placed.masters[from * num_local + i];
      expert = rows > largest ? from * num_local + i : expert;
      largest = max(largest, rows);
    }
    const int32_t lane_largest = largest;
    largest = __reduce_max_sync(kAllLanes, largest);
    expert = __reduce_min_sync(kAllLanes, lane_largest == largest ? expert : kMostRows);
    if (largest < min_rows) {
      return -1;
    }
    const int32_t moved = in_blocks(call, min(limit - least, largest));
    __syncwarp();  // all have read the masters' rows
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if (load.rank(k) == from) {
        load.of[k] -= moved;
        placed.masters[expert] = largest - moved;
      }
      if (load.rank(k) == to) {
        const int replica = to * call.shape.replicas + used.of[k];
        placed.experts[replica] = expert;
        placed.replicas[replica] = moved;
        load.of[k] += moved;
        ++used.of[k];
      }
    }
    __syncwarp();
  }
}

// Sums, by all threads, the `rows` [num_experts] of all sources.
__device__ inline void sum_sources(const BalanceLaunch& call, int32_t* rows) {
  const int num_experts = call.shape.num_experts;
  for (int expert = static_cast<int>(threadIdx.x); expert < num_experts; expert += kPlaceThreads) {
    rows[expert] = 0;
  }
  __syncthreads();
  for (int source = warp_in_block(); source < call.shape.num_ranks; source += kPlaceWarps) {
    const int32_t* const counts = call.counts + static_cast<size_t>(source) * num_experts;
#pragma unroll 8
    for (int expert = lane_index(); expert < num_experts; expert += kWarpLanes) {
      atomicAdd(rows + expert, __ldg(counts + expert));
    }
  }
  __syncthreads();
}

// Sums, by all threads, the rows of each rank's masters to `loads` [num_ranks].
__device__ inline void sum_ranks(
    const PhysicalExperts& shape, const int32_t* rows, int32_t* loads
) {
  const int num_local = shape.num_local();
  for (int rank = warp_in_block(); rank < shape.num_ranks; rank += kPlaceWarps) {
    int32_t sum = 0;
    for (int i = lane_index(); i < num_local; i += kWarpLanes) {
      sum += rows[rank * num_local + i];
    }
    sum = __reduce_add_sync(kAllLanes, sum);
    if (lane_index() == 0) {
      loads[rank] = sum;
    }
  }
  __syncthreads();
}

// Writes a placement to the caller's memory, by all threads; without `experts` it has no replicas.
__device__ inline void publish(const BalanceLaunch& call, const PlacedRows& placed) {
  const PhysicalExperts& shape = call.shape;
  const auto thread = static_cast<int>(threadIdx.x);
  for (int expert = thread; expert < shape.num_experts; expert += kPlaceThreads) {
    call.rows[shape.master_of(expert)] = placed.masters[expert];
  }
  for (int i = thread; i < shape.num_ranks * shape.replicas; i += kPlaceThreads) {
    const int place = shape.place_of(i / shape.replicas, i % shape.replicas);
    call.replicas[i] = placed.experts == nullptr ? -1 : placed.experts[i];
    call.rows[place] = placed.experts == nullptr ? 0 : placed.replicas[i];
  }
}

// Resets `placed` before an attempt, by all lanes of a warp.
__device__ inline void clear_placed(
    const PhysicalExperts& shape, const int32_t* rows, const PlacedRows& placed
) {
  for (int expert = lane_index(); expert < shape.num_experts; expert += kWarpLanes) {
    placed.masters[expert] = rows[expert];
  }
  for (int i = lane_index(); i < shape.num_ranks * shape.replicas; i += kWarpLanes) {
    placed.experts[i] = -1;
    placed.replicas[i] = 0;
  }
  __syncwarp();
}

// Returns, to all threads, the most replicas that some rank sends or takes in the published
// placement. `moved` has [2 * num_ranks].
__device__ inline int32_t most_moved(const BalanceLaunch& call, int32_t* moved) {
  const PhysicalExperts& shape = call.shape;
  const auto thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < 2 * shape.num_ranks; i += kPlaceThreads) {
    moved[i] = 0;
  }
  __syncthreads();
  for (int i = thread; i < shape.num_ranks * shape.replicas; i += kPlaceThreads) {
    const int32_t expert = call.replicas[i];
    if (expert >= 0) {
      atomicAdd(moved + shape.owner_of(expert), 1);
      atomicAdd(moved + shape.num_ranks + i / shape.replicas, 1);
    }
  }
  __syncthreads();
  int32_t most = 0;
  for (int i = 0; i < 2 * shape.num_ranks; ++i) {
    most = max(most, moved[i]);
  }
  return most;
}

struct PlaceShared {
  int32_t* rows;     // [num_experts] of all sources; place_shared_bytes() from there on
  int32_t* loads;    // [num_ranks]
  int32_t* outcome;  // [kPlaceWarps]
  int32_t* moved;    // [2 * num_ranks]
};

// Copies, by all threads, the published rows, to be poured. `poured` has the words of an attempt.
__device__ inline PouredRows copy_published(const BalanceLaunch& call, int32_t* poured) {
  const PhysicalExperts& shape = call.shape;
  const PouredRows rows = {poured, call.replicas, poured + shape.num_experts};
  const auto thread = static_cast<int>(threadIdx.x);
  for (int expert = thread; expert < shape.num_experts; expert += kPlaceThreads) {
    poured[expert] = 0;
  }
  for (int place = thread; place < shape.count(); place += kPlaceThreads) {
    rows.here[place] = call.rows[place];
  }
  __syncthreads();
  for (int i = thread; i < shape.num_ranks * shape.replicas; i += kPlaceThreads) {
    if (call.replicas[i] >= 0) {
      poured[call.replicas[i]] = 1;
    }
  }
  __syncthreads();
  return rows;
}

// Pours copied rows, by all lanes of a warp. Returns the rows of the busiest rank, or -1 if a
// replica would have too few.
template <int kPerLane>
__device__ inline int32_t pour_placed(
    const BalanceLaunch& call, uint32_t lost, const PouredRows& rows
) {
  const PhysicalExperts& shape = call.shape;
  OfRanks<kPerLane> load;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    for (int i = 0; load.rank(k) < shape.num_ranks && i < shape.per_rank(); ++i) {
      load.of[k] += rows.here[load.rank(k) * shape.per_rank() + i];
    }
  }
  pour_all(call, lost, rows, list_experts(shape, rows.poured), load);
  __syncwarp();
  int32_t most = 0;
  bool is_enough = true;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    most = max(most, load.of[k]);
    for (int i = 0; load.rank(k) < shape.num_ranks && i < shape.replicas; ++i) {
      const int32_t here = rows.here[shape.place_of(load.rank(k), i)];
      const bool is_empty = call.replicas[load.rank(k) * shape.replicas + i] < 0;
      is_enough = is_enough && (is_empty || here >= least_rows(call));
    }
  }
  most = __reduce_max_sync(kAllLanes, most);
  return __all_sync(kAllLanes, is_enough) != 0 ? most : -1;
}

// Does even_out() of plan/balance/place.cpp, by all threads. `best`: rows of the busiest rank as
// published. Returns that number afterwards.
template <int kPerLane>
__device__ inline int32_t even_out(
    const BalanceLaunch& call, uint32_t lost, const PlaceShared& shared, int32_t best
) {
  int32_t* const attempts = shared.rows + call.shape.num_experts;  // all are over
  const PouredRows rows = copy_published(call, attempts);
  if (warp_in_block() == 0) {
    const int32_t busiest = pour_placed<kPerLane>(call, lost, rows);
    if (lane_index() == 0) {
      shared.outcome[0] = busiest;
    }
  }
  __syncthreads();
  const int32_t poured = shared.outcome[0];
  if (poured < 0 || poured >= best) {
    return best;
  }
  const auto thread = static_cast<int>(threadIdx.x);
  for (int place = thread; place < call.shape.count(); place += kPlaceThreads) {
    call.rows[place] = rows.here[place];
  }
  __syncthreads();
  return poured;
}

// Places replicas, by all threads of a block, once `rows` of all experts are there; experts of
// `lost` ranks have none.
template <int kPerLane>
__device__ __forceinline__ void place_replicas(
    const BalanceLaunch& call, uint32_t lost, const PlaceShared& shared
) {
  int32_t* const rows = shared.rows;
  int32_t* const loads = shared.loads;
  int32_t* const outcome = shared.outcome;
  const int warp = warp_in_block();
  const PlacedRows own = placed_rows(call.shape, rows, warp);
  sum_ranks(call.shape, rows, loads);
  publish(call, {rows, nullptr, nullptr});

  OfRanks<kPerLane> load;
  int32_t total = 0;
  int32_t busiest = 0;
  for (int k = 0; k < kPerLane; ++k) {
    load.of[k] = load.rank(k) < call.shape.num_ranks ? loads[load.rank(k)] : -1;
    total += max(load.of[k], 0);
    busiest = max(busiest, load.of[k]);
  }
  busiest = __reduce_max_sync(kAllLanes, busiest);
  int32_t best = busiest;
  const int num_left = call.shape.num_ranks - __popc(lost);
  LimitSearch search(__reduce_add_sync(kAllLanes, total), num_left, busiest);
  while (!search.is_over()) {  // the same in all threads
    int32_t kept = -1;
    if (search.tries(warp)) {
      clear_placed(call.shape, rows, own);
      kept = try_limit(call, lost, static_cast<int32_t>(search.limit(warp)), load, own);
    }
    if (lane_index() == 0) {
      outcome[warp] = kept;
    }
    __syncthreads();
    const int probe = lane_index() % kPlaceWarps;
    const uint32_t probes = __ballot_sync(kAllLanes, outcome[probe] >= 0);
    if (probes == 0) {
      search.fail();
    } else {
      const int lowest = __ffs(static_cast<int>(probes)) - 1;
      best = outcome[lowest];
      search.keep(lowest, best);
      publish(call, placed_rows(call.shape, rows, lowest));
    }
    __syncthreads();  // before the next round overwrites it
  }
  if (!search.is_even(best)) {
    best = even_out<kPerLane>(call, lost, shared, best);
  }
  if (call.replica_rows > 0 &&
      busiest - best <= most_moved(call, shared.moved) * call.replica_rows) {  // see pays_off()
    __syncthreads();
    publish(call, {rows, nullptr, nullptr});
  }
}

}  // namespace weft
