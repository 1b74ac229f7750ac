// SPDX-License-Identifier: Apache-2.0
// How long each lane worked, and how much of the exchange nothing hid: from the spans of a trace.
#pragma once

#include <array>
#include <cstdint>

#include "overlap/trace.hpp"

namespace weft::overlap {

struct LaneTimes {
  int64_t wall_ns = 0;                          // from the first begin to the last end
  std::array<int64_t, kNumLanes> busy_ns = {};  // by lane; waiting for the other lane is not in it
  int64_t exposed_ns = 0;                       // the exchange lane was busy, the compute lane not
};

[[nodiscard]] LaneTimes lane_times(const Trace& trace);

}  // namespace weft::overlap
