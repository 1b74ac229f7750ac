// SPDX-License-Identifier: Apache-2.0
// What everyone's counts say about every rank's output; equal on all ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/build.hpp"
#include "plan/slots.hpp"

namespace weft {

// kExpertMajor and kExpertStrided; with kRankMajor only `rows` has a meaning.
struct ExpertBlock {
  int64_t rows = 0;   // routes of all ranks
  int64_t begin = 0;  // first slot
  int64_t limit = 0;  // first slot that is not the block's
};

struct OutputShape {
  int64_t required_rows = 0;
  int64_t num_rows = 0;
  bool overflow = false;  // some route to this rank is dropped
};

struct GroupShape {
  BlockRule rule;                    // stride resolved
  std::vector<ExpertBlock> experts;  // [num_experts]
  std::vector<OutputShape> outputs;  // [num_ranks]
};

// Throws Error (kInvalidArgument) if an output has more rows than slots can number, or lacks room
// under Overflow::kError; the text is the same on every rank.
[[nodiscard]] GroupShape group_shape(
    std::span<const RankCounts> counts,
    int num_experts,
    const PlanOptions& options,
    const Context& context
);

}  // namespace weft
