// SPDX-License-Identifier: Apache-2.0
// The bounds of docs/wire.md, and a sum in exact numbers that they are for.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>

#include "weft/calls.hpp"

namespace weft::test {

// Range of a group's magnitudes; `least` is that of those that are not zero.
struct GroupRange {
  double least = 0;
  double largest = 0;
};

[[nodiscard]] inline GroupRange range_of(std::span<const double> group) {
  GroupRange range;
  for (const double value : group) {
    const double magnitude = std::fabs(value);
    range.largest = std::max(range.largest, magnitude);
    if (magnitude > 0 && (range.least == 0 || magnitude < range.least)) {
      range.least = magnitude;
    }
  }
  return range;
}

// How far what a code stands for may be from the value of a group with this range.
[[nodiscard]] inline double wire_bound(Wire wire, double value, const GroupRange& range) {
  const double magnitude = std::fabs(value);
  if (wire == Wire::kFp8) {
    return 1.0002 * std::max({magnitude / 16, range.largest / 458752, 0x1p-136});
  }
  const double octaves = range.largest > 0 ? std::log2(range.largest / range.least) : 0;
  const double step = (std::min(octaves, 32.0) + 0.1) / 1020;
  return std::max(step * std::max(magnitude, 0x1p-126), range.largest * 0x1p-32);
}

}  // namespace weft::test
