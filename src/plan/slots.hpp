// SPDX-License-Identifier: Apache-2.0
// The arithmetic of slots, the same for host loops and device kernels: no containers, no errors.
#pragma once

#include <cstdint>

#include "core/hd.hpp"

namespace weft {

WEFT_HD constexpr int owner_rank(int expert, int experts_per_rank) {
  return expert / experts_per_rank;
}

WEFT_HD constexpr int local_expert(int expert, int experts_per_rank) {
  return expert % experts_per_rank;
}

// Rounds up; zero stays zero. Both are far below 2^62, so the sum cannot overflow.
WEFT_HD constexpr int64_t padded_count(int64_t rows, int64_t multiple) {
  return (rows + multiple - 1) / multiple * multiple;
}

WEFT_HD constexpr int64_t at_most(int64_t value, int64_t limit) {
  return value < limit ? value : limit;
}

// How expert blocks follow each other in a receiver's output.
struct BlockRule {
  bool strided = false;
  int64_t pad_multiple = 1;
  int64_t stride = 0;
};

// Rows from the begin of a block to the begin of the next.
WEFT_HD constexpr int64_t block_step(const BlockRule& rule, int64_t rows) {
  return rule.strided ? rule.stride : padded_count(rows, rule.pad_multiple);
}

// First slot that the block must not use: its neighbour's, or the end of the output.
WEFT_HD constexpr int64_t block_limit(const BlockRule& rule, int64_t begin, int64_t num_rows) {
  return rule.strided ? begin + rule.stride : num_rows;
}

// Returns how many of `rows` slots from `begin` on lie below `limit`.
WEFT_HD constexpr int64_t rows_within(int64_t begin, int64_t rows, int64_t limit) {
  const int64_t room = limit > begin ? limit - begin : 0;
  return at_most(rows, room);
}

// A route's slot from its place among all that share its block; -1 if it must be dropped.
WEFT_HD constexpr int32_t slot_or_dropped(int64_t slot, int64_t limit) {
  return slot < limit ? static_cast<int32_t>(slot) : -1;
}

}  // namespace weft
