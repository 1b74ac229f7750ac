// SPDX-License-Identifier: Apache-2.0
// Chunks whose callbacks do nothing, and schedules as lists of names.
#pragma once

#include <string>
#include <vector>

#include "overlap/nodes.hpp"
#include "overlap/schedule.hpp"

namespace weft::overlap::test {

enum class Kind { kMoe, kDense, kMtp };  // kMtp: all five nodes

struct PlainChunk {
  int num_layers = 1;
  Kind kind = Kind::kMoe;
  bool defer_weight_gradients = true;
  bool has_ends = true;  // pre_process and post_process
  bool has_hooks = false;
};

[[nodiscard]] ChunkNodes plain_nodes(const PlainChunk& chunk);

// In the order of issue; those of one lane alone with the second.
[[nodiscard]] std::vector<std::string> step_names(const Schedule& schedule);
[[nodiscard]] std::vector<std::string> step_names(const Schedule& schedule, Lane lane);

}  // namespace weft::overlap::test
