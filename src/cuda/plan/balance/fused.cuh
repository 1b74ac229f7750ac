// SPDX-License-Identifier: Apache-2.0
// Replicas in the launch that plans and dispatches few tokens (plan/fused.cuh). Each planning block
// has all ranks' routing, so it does by itself, in shared memory, what the kernels of balance.cu do
// one after the other, with the same functions:
//
//   routing of all ranks -> counts -> place.cuh or spread.cuh -> share_out.cuh -> assign.cuh
//
// All routes become those to physical experts where they are. Only experts that have replicas are
// shared out; all rows of the others stay at their masters.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/layout/launch.hpp"
#include "cuda/plan/balance/assign.cuh"
#include "cuda/plan/balance/launch.hpp"
#include "cuda/plan/balance/place.cuh"
#include "cuda/plan/balance/share_out.cuh"
#include "cuda/plan/balance/spread.cuh"
#include "cuda/plan/shared.cuh"
#include "cuda/plan/swap_routing.cuh"

namespace weft {

static_assert(kRoutedThreads == kPlaceThreads && kMaxDomainRanks <= kWarpLanes);

// Arrays that the threads of a block share, behind PlanArrays.
struct BalanceArrays {
  int32_t* counts = nullptr;    // [num_ranks, num_experts] routes; then those that are assigned
  int32_t* quotas = nullptr;    // [num_ranks, shape.count()]; then AssignShared::end by source
  int32_t* rows = nullptr;      // [shape.count()] of each place
  int32_t* replicas = nullptr;  // [num_ranks, shape.replicas]
  PlaceLists places;
  PlaceShared search;  // its rows are those of SpreadShared, too

  // Returns the words in all; a null `base` only counts.
  WEFT_HD uint32_t lay_out(const PhysicalExperts& shape, int32_t* base) {
    uint32_t end = 0;
    const auto take = [&](int32_t*& array, int words) {
      array = base == nullptr ? nullptr : base + end;
      end += static_cast<uint32_t>(words);
    };
    take(counts, shape.num_ranks * shape.num_experts);
    take(quotas, shape.num_ranks * shape.count());
    take(rows, shape.count());
    take(replicas, shape.num_ranks * shape.replicas);
    take(places.first, shape.num_experts);
    take(places.next, shape.count());
    take(search.loads, shape.num_ranks);
    take(search.outcome, kPlaceWarps);
    take(search.moved, 2 * shape.num_ranks);
    take(search.rows, place_shared_bytes(shape) / static_cast<int>(sizeof(int32_t)));
    return end;
  }
};

WEFT_HD inline PhysicalExperts physical_experts(const PlanMap& map) {
  return {
      static_cast<int>(map.num_ranks),
      static_cast<int>(map.num_experts - map.num_ranks * map.replicas),
      static_cast<int>(map.replicas)};
}

// Experts that a block plans for where popular ones have replicas, in place of PlainExperts of
// plan/fused.cuh.
class BalancedExperts {
 public:
  static constexpr bool kIsBalanced = true;

  // `base` has the words of BalanceArrays.
  __device__ BalancedExperts(const BalancedDispatchLaunch& call, std::byte* base)
      : call_(call), shape_(physical_experts(call.plan.plan.map)) {
    arrays_.lay_out(shape_, reinterpret_cast<int32_t*>(base));
  }

  [[nodiscard]] __device__ ChosenExperts chosen() const {
    return {static_cast<uint32_t>(shape_.num_experts), call_.chosen_per_rank};
  }

  // Turns, by all threads, shared.experts, all ranks' routes, into those to physical experts.
  __device__ __forceinline__ void settle(const PlanPlace& place, const PlanShared& shared) const {
    count(shared);
    BalanceLaunch balance;
    balance.shape = shape_;
    balance.min_rows = call_.min_rows;
    balance.block_rows = call_.block_rows;
    balance.replica_rows = call_.replica_rows;
    balance.counts = arrays_.counts;
    balance.replicas = arrays_.replicas;
    balance.rows = arrays_.rows;
    balance.quotas = arrays_.quotas;
    balance.places = arrays_.places;
    if (call_.is_given) {
      int32_t* const rows = arrays_.search.rows;
      const SpreadShared spread = {rows, rows + shape_.num_experts, arrays_.replicas, arrays_.rows};
      spread_rows(balance, place.lost, spread, arrays_.search.loads, call_.placement);
    } else {
      place_replicas<1>(balance, place.lost, arrays_.search);
      __syncthreads();
    }
    share_out(balance, place.lost);
    assign(place, shared);
  }

  // Writes where replicas lie into the plan, by all threads of one block.
  __device__ void write_placement() const {
    for (int i = thread(); i < shape_.num_ranks * shape_.replicas; i += kPlaceThreads) {
      call_.plan.plan.placement()[i] = arrays_.replicas[i];
    }
  }

 private:
  [[nodiscard]] static __device__ __forceinline__ int thread() {
    return static_cast<int>(threadIdx.x);
  }
  [[nodiscard]] __device__ __forceinline__ int num_routes(const PlanShared& shared, int source)
      const {
    return shared.words[source].num_tokens * call_.plan.topk;
  }

  // Finds, by all threads, the counts, and from them the rows of all experts.
  __device__ __forceinline__ void count(const PlanShared& shared) const {
    const int num_experts = shape_.num_experts;
    clear_counts(arrays_.counts, shape_.num_ranks * num_experts);
    __syncthreads();
#pragma unroll 1
    for (int source = 0; source < shape_.num_ranks; ++source) {
      const uint16_t* const experts = shared.experts_of(static_cast<uint32_t>(source));
      const int count = num_routes(shared, source);
#pragma unroll 1
      for (int route = thread(); route < count; route += kPlaceThreads) {
        const uint16_t expert = experts[route];
        if (expert != kNoShortExpert) {
          atomicAdd(arrays_.counts + source * num_experts + expert, 1);
        }
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int expert = thread(); expert < num_experts; expert += kPlaceThreads) {
      int32_t rows = 0;
#pragma unroll 4
      for (int source = 0; source < shape_.num_ranks; ++source) {
        rows += arrays_.counts[source * num_experts + expert];
      }
      arrays_.search.rows[expert] = rows;
    }
    __syncthreads();
  }

  // Finds, by all threads, quotas and lists of places.
  __device__ __forceinline__ void share_out(const BalanceLaunch& balance, uint32_t lost) const {
    const int num_experts = shape_.num_experts;
    const int num_replicas = shape_.num_ranks * shape_.replicas;
#pragma unroll 1
    for (int expert = thread(); expert < num_experts; expert += kPlaceThreads) {
      const int master = shape_.master_of(expert);
      const bool is_lost = lost != 0 && is_lost_rank(lost, shape_.owner_of(expert));
      arrays_.places.first[expert] = master;
      arrays_.places.next[master] = -1;
#pragma unroll 4
      for (int source = 0; source < shape_.num_ranks; ++source) {
        arrays_.quotas[source * shape_.count() + master] =
            is_lost ? 0 : arrays_.counts[source * num_experts + expert];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = warp_in_block(); i < num_replicas; i += kPlaceWarps) {
      const int32_t expert = arrays_.replicas[i];
      bool is_shared_out = expert < 0;  // by the warp of an earlier one
#pragma unroll 1
      for (int other = lane_index(); other < i; other += kWarpLanes) {
        is_shared_out = is_shared_out || arrays_.replicas[other] == expert;
      }
      if (__any_sync(kAllLanes, is_shared_out) == 0) {
        share_expert<1>(balance, expert);
      }
    }
    __syncthreads();
  }

  // Assigns routes to places, by all threads; each warp has one source at a time.
  __device__ __forceinline__ void assign(const PlanPlace& place, const PlanShared& shared) const {
    const int num_experts = shape_.num_experts;
    clear_counts(arrays_.counts, shape_.num_ranks * num_experts);
#pragma unroll 1
    for (int source = 0; source < shape_.num_ranks; ++source) {
#pragma unroll 1
      for (int expert = thread(); expert < num_experts; expert += kPlaceThreads) {
        quotas_to_ends(of_source(source, place.lost), expert);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int source = warp_in_block(); source < shape_.num_ranks; source += kPlaceWarps) {
      const AssignShared assigned = of_source(source, place.lost);
      uint16_t* const experts = shared.experts_of(static_cast<uint32_t>(source));
      const int count = num_routes(shared, source);
#pragma unroll 1
      for (int first = 0; first < count; first += kWarpLanes) {
        const int route = first + lane_index();
        const uint16_t chosen = route < count ? experts[route] : kNoShortExpert;
        const int32_t expert = chosen == kNoShortExpert ? -1 : chosen;
        const int32_t physical = assign_step(shape_, assigned, assigned.counts, expert);
        if (route < count) {
          experts[route] = physical >= 0 ? static_cast<uint16_t>(physical) : kNoShortExpert;
        }
      }
    }
    __syncthreads();
  }

  // Returns a source's arrays; `counts` are of its only warp.
  [[nodiscard]] __device__ __forceinline__ AssignShared of_source(int source, uint32_t lost) const {
    return {
        arrays_.places.first,
        arrays_.places.next,
        arrays_.quotas + source * shape_.count(),
        arrays_.counts + source * shape_.num_experts,
        lost};
  }

  const BalancedDispatchLaunch& call_;
  PhysicalExperts shape_;
  BalanceArrays arrays_;
};

}  // namespace weft
