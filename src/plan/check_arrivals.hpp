// SPDX-License-Identifier: Apache-2.0
// Bounds of one pair's arrivals that came from outside: another process or a file.
#pragma once

#include <string>

#include "plan/plan_data.hpp"

namespace weft {

struct ArrivalBounds {
  int64_t num_tokens = 0;  // of the source
  int64_t num_rows = 0;    // of the receiver
  int topk = 0;
  int num_local_experts = 0;
  bool one_row = false;
};

// Empty if executors may follow these arrivals, else what is wrong, e.g. "slot[3] = 70 is out of
// range (num_rows = 64)".
[[nodiscard]] std::string arrivals_fault(const Arrivals& arrivals, const ArrivalBounds& bounds);

}  // namespace weft
