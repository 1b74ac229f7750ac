// SPDX-License-Identifier: Apache-2.0
// Chunks whose callbacks do nothing, and schedules as lists of names.
#pragma once

#include <string>
#include <vector>

#include "train/lanes/schedule.hpp"

namespace weft::overlap::test {

struct PlainChunk {
  int num_layers = 1;
  bool is_moe = true;
  bool defer_weight_gradients = true;
  bool has_ends = true;  // pre_process and post_process
};

[[nodiscard]] ChunkNodes plain_nodes(const PlainChunk& chunk);

// Return the steps' names in the order of issue; the second, only those of one lane.
[[nodiscard]] std::vector<std::string> step_names(const Schedule& schedule);
[[nodiscard]] std::vector<std::string> step_names(const Schedule& schedule, Lane lane);

}  // namespace weft::overlap::test
