// SPDX-License-Identifier: Apache-2.0
// The layout of a plan block's shared memory, as byte offsets, for host and device: the host asks
// how large it is, the kernel (shared.cuh) where each array lies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/layout/control.hpp"
#include "cuda/plan/numbers.hpp"

namespace weft {

inline constexpr uint32_t kPlanLanes = 32;
inline constexpr uint32_t kMaxPlanThreads = 512;  // of a block; a guess

// A block of fused.cuh plans for a part of one rank's tokens. Besides those it counts, separately,
// the tokens of other ranks and the other parts of that rank.
enum OtherCounts : uint32_t { kEarlierRanks, kLaterRanks, kEarlierParts, kLaterParts };
inline constexpr uint32_t kOtherCounts = 4;

// Offsets in bytes; PlanShared in shared.cuh says what lies there.
struct PlanSharedMap {
  uint32_t num_ranks = 1;
  uint32_t num_experts = 1;
  uint32_t num_routes = 0;  // most of a rank; 0 where routes are not kept here

  [[nodiscard]] WEFT_HD static constexpr uint32_t align(uint32_t bytes) {
    return (bytes + 15) / 16 * 16;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t columns() const { return num_ranks + num_experts; }
  // Fewer warps where each one's counts are many: at most 80 KiB of counts. That is a guess; a
  // block of compute capability 8.0 may have 163 KiB of shared memory in all.
  [[nodiscard]] WEFT_HD constexpr uint32_t num_threads() const {
    constexpr uint32_t kMostCounts = 20 * 1024;
    uint32_t threads = kMaxPlanThreads;
    while (threads > 64 && threads / kPlanLanes * columns() > kMostCounts) {
      threads /= 2;
    }
    return threads;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t counts() const { return 0; }
  [[nodiscard]] WEFT_HD constexpr uint32_t before() const {
    return align(num_threads() / kPlanLanes * columns() * sizeof(uint32_t));
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t message() const {
    return before() + align(columns() * sizeof(uint32_t));
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t message_bytes() const {
    return align(static_cast<uint32_t>(sizeof(DeviceHandshake)) + columns() * 4);
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t total() const { return message() + message_bytes(); }
  [[nodiscard]] WEFT_HD constexpr uint32_t earlier() const {
    return total() + align(columns() * sizeof(int64_t));
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t begin() const {
    return earlier() + align(columns() * sizeof(int64_t));
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t runs() const {
    return begin() + align((num_experts + 1) * sizeof(int64_t));
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t words() const {
    return runs() + align(columns() * sizeof(SlotRun));
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t others() const {
    return words() + static_cast<uint32_t>(num_ranks * sizeof(DeviceHandshake));
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t experts() const {
    return others() + (num_routes == 0 ? 0 : align(kOtherCounts * columns() * sizeof(uint32_t)));
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t route_expert() const {
    return experts() + align(num_ranks * num_routes * sizeof(uint16_t));
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t route_weight() const {
    return route_expert() + align(num_routes * sizeof(int32_t));
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t num_bytes() const {
    return route_weight() + align(num_routes * sizeof(float));
  }
};

}  // namespace weft
