// SPDX-License-Identifier: Apache-2.0
// Rows that one kind of operation moved.
#pragma once

#include <cstdint>

#include "weft/plan.hpp"

namespace weft::moe {

// For one rank.
struct Traffic {
  int64_t calls = 0;
  int64_t wire_bytes = 0;     // to other ranks in a dispatch, from them in a combine
  int64_t logical_bytes = 0;  // all rows, this rank's own included

  void count(const Plan& plan, int64_t row_bytes) {
    ++calls;
    wire_bytes += plan.wire_bytes(row_bytes);
    logical_bytes += plan.logical_bytes(row_bytes);
  }
};

}  // namespace weft::moe
