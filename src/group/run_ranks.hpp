// SPDX-License-Identifier: Apache-2.0
// run_forked() with another patience than the usual one, for tests.
#pragma once

#include <chrono>

#include "weft/group.hpp"

namespace weft {

struct ForkLimits {
  // After a rank failed, the others have this long to notice by themselves; then they are
  // terminated, and a little later killed.
  std::chrono::milliseconds notice = std::chrono::seconds(5);
  std::chrono::milliseconds terminate = std::chrono::seconds(2);
};

[[nodiscard]] std::vector<int> run_forked(
    int num_ranks, const std::function<int(Group&)>& body, const ForkLimits& limits
);

}  // namespace weft
