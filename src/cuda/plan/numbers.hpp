// SPDX-License-Identifier: Apache-2.0
// Small integer arithmetic of the plan kernel, for host and device alike: division without a divide
// instruction, numbers of slots in 32 bits, and spans of tokens.
#pragma once

#include <cstdint>

#include "core/hd.hpp"

namespace weft {

// Division by a number that is known only at run time, without a divide: exact for values and
// divisors below 2^16.
class FastDivide {
 public:
  FastDivide() = default;
  WEFT_HD constexpr explicit FastDivide(uint32_t divisor)
      : divisor_(divisor), factor_(uint64_t{UINT32_MAX / divisor} + 1) {}

  [[nodiscard]] WEFT_HD constexpr uint32_t divide(uint32_t value) const {
    return static_cast<uint32_t>(value * factor_ >> 32);
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t remainder(uint32_t value, uint32_t quotient) const {
    return value - quotient * divisor_;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t divisor() const { return divisor_; }

 private:
  uint32_t divisor_ = 1;
  uint64_t factor_ = uint64_t{1} << 32;
};

// A slot in 32 bits. Limits are clamped alike, so what cannot be numbered is dropped.
WEFT_HD constexpr uint32_t slot_number(int64_t slot) {
  constexpr int64_t kMost = INT32_MAX;
  return slot < 0 ? 0U : static_cast<uint32_t>(slot < kMost ? slot : kMost);
}

// The rows that one rank's routes to an expert, or arrivals at a rank, take one after the other.
struct alignas(8) SlotRun {
  uint32_t start = 0;
  uint32_t limit = 0;

  // Slot of the route or arrival number `place` of the run; -1 if it must be dropped.
  [[nodiscard]] WEFT_HD constexpr int32_t slot(uint32_t place) const {
    const uint32_t at = start + place;  // both are below 2^31
    return at < limit ? static_cast<int32_t>(at) : -1;
  }
};

// Bits [0, count) of a lane mask; count from 0 to 32.
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

}  // namespace weft
