// SPDX-License-Identifier: Apache-2.0
// Parts of the plan kernel that host and device share: small integer arithmetic, and the layout of
// a block's shared memory, from which the host takes its size, the kernel (shared.cuh) each array's
// place.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/layout/control.hpp"

namespace weft {

// Returns a slot in 32 bits. Limits are clamped alike, so what has no such number is dropped.
WEFT_HD constexpr uint32_t slot_number(int64_t slot) {
  constexpr int64_t kMost = INT32_MAX;
  return slot < 0 ? 0U : static_cast<uint32_t>(slot < kMost ? slot : kMost);
}

// The rows that one rank's routes to an expert, or arrivals at a rank, take one after the other.
struct alignas(8) SlotRun {
  uint32_t start = 0;
  uint32_t limit = 0;

  // Returns the slot of the run's route or arrival `place`; -1 if it must be dropped.
  [[nodiscard]] WEFT_HD constexpr int32_t slot(uint32_t place) const {
    const uint32_t at = start + place;  // both are below 2^31
    return at < limit ? static_cast<int32_t>(at) : -1;
  }
};

// Returns bits [0, count) of a lane mask; count from 0 to 32.
WEFT_HD constexpr uint32_t low_lanes(uint32_t count) {
  return count >= 32 ? 0xffffffffU : (1U << count) - 1U;
}

// A contiguous part of `total` things for each of `num_parts`, the last ones possibly shorter.
struct PartSpan {
  int32_t first = 0;
  int32_t last = 0;
};

WEFT_HD constexpr PartSpan part_span(
    int32_t begin, int32_t end, uint32_t num_parts, uint32_t part_idx
) {
  const auto total = static_cast<uint32_t>(end - begin);
  const uint32_t each = (total + num_parts - 1) / num_parts;
  const uint64_t first = uint64_t{each} * part_idx;
  const uint64_t last = first + each;
  const auto within = [&](uint64_t place) {
    return begin + static_cast<int32_t>(place < total ? place : total);
  };
  return {within(first), within(last)};
}

inline constexpr uint32_t kPlanLanes = 32;
inline constexpr uint32_t kMaxPlanThreads = 512;  // of a block; a guess

// A block of fused.cuh plans for a part of one rank's tokens. Besides that part it counts,
// separately, other ranks' tokens and that rank's other parts.
enum OtherCounts : uint32_t { kEarlierRanks, kLaterRanks, kEarlierParts, kLaterParts };
inline constexpr uint32_t kOtherCounts = 4;

// The arrays in a block's dynamic shared memory.
struct PlanArrays {
  uint32_t* counts = nullptr;  // [num_warps][columns] of each warp; later of the warps before it
  uint32_t* before = nullptr;  // [columns] of this rank's earlier blocks
  DeviceHandshake* message = nullptr;  // this rank's handshake; [columns] of its counts follow
  int64_t* total = nullptr;            // [columns] of all ranks
  int64_t* earlier = nullptr;          // [columns] of the ranks before this one
  int64_t* begin = nullptr;            // [num_experts + 1] rows of all experts before, across ranks
  SlotRun* runs = nullptr;             // [columns] of this block's routes, or arrivals (rank_major)
  DeviceHandshake* words = nullptr;    // [num_ranks] as told by each rank
  // The rest is of a plan that every rank makes from all ranks' routing (fused.cuh).
  uint32_t* others = nullptr;     // [kOtherCounts][columns]
  uint16_t* experts = nullptr;    // [num_ranks][num_routes] of routes, all ones for none
  int32_t* route_slot = nullptr;  // [num_tokens, topk] of the rank that is planned
  float* route_weight = nullptr;
};

struct PlanSharedMap {
  uint32_t num_ranks = 1;
  uint32_t num_experts = 1;
  uint32_t num_routes = 0;  // most of a rank; 0 where routes are not kept here

  [[nodiscard]] WEFT_HD constexpr uint32_t columns() const { return num_ranks + num_experts; }
  // Returns fewer threads where each warp's counts are many: at most 80 KiB of counts, a guess; a
  // block of compute capability 8.0 may have 163 KiB of shared memory in all.
  [[nodiscard]] WEFT_HD constexpr uint32_t num_threads() const {
    constexpr uint32_t kMostCounts = 20 * 1024;
    uint32_t threads = kMaxPlanThreads;
    while (threads > 64 && threads / kPlanLanes * columns() > kMostCounts) {
      threads /= 2;
    }
    return threads;
  }
  // Calls take(array, its bytes) for each array, in the order in which they lie.
  template <class Take>
  WEFT_HD constexpr void lay_out(PlanArrays& arrays, const Take& take) const {
    const auto add = [&](auto*& array, uint32_t count, uint32_t more_bytes = 0) {
      const auto bytes = static_cast<uint32_t>(count * sizeof(*array)) + more_bytes;
      take(array, (bytes + 15) / 16 * 16);
    };
    add(arrays.counts, num_threads() / kPlanLanes * columns());
    add(arrays.before, columns());
    add(arrays.message, 1, columns() * sizeof(int32_t));
    add(arrays.total, columns());
    add(arrays.earlier, columns());
    add(arrays.begin, num_experts + 1);
    add(arrays.runs, columns());
    add(arrays.words, num_ranks);
    add(arrays.others, num_routes == 0 ? 0 : kOtherCounts * columns());
    add(arrays.experts, num_ranks * num_routes);
    add(arrays.route_slot, num_routes);
    add(arrays.route_weight, num_routes);
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t num_bytes() const {
    PlanArrays arrays;
    uint32_t all = 0;
    lay_out(arrays, [&](auto*& /*array*/, uint32_t bytes) { all += bytes; });
    return all;
  }
};

}  // namespace weft
