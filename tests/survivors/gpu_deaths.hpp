// SPDX-License-Identifier: Apache-2.0
// Processes that share GPUs and die one after the other, down to the last (PeerLoss::kShrink): the
// others make plan, dispatch and combine again and again, and compare what they get with the
// reference, which has holes where routes went to lost ranks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "weft/group.hpp"

namespace weft::test {

inline constexpr int kMostDyingRanks = 8;

struct GpuDeaths {
  int num_ranks = 4;  // at most kMostDyingRanks
  int num_gpus = 1;
  uint64_t seed = 1;
  bool is_replayed = false;  // the calls are those of a captured graph
};

// By the number of the death, from 0: nanoseconds of the clock, 0 for none.
struct DeathTimes {
  std::array<std::atomic<int64_t>, kMostDyingRanks> death = {};
  std::array<std::array<std::atomic<int64_t>, kMostDyingRanks>, kMostDyingRanks> heard =
      {};  // by rank
};

// What one rank does. Returns 0, or 1 when it has written to stderr what was wrong.
[[nodiscard]] int live_through_deaths(
    const Group& group, const GpuDeaths& deaths, DeathTimes& times
);

// What has become of all processes of one group.
struct GroupOfDeaths {
  std::vector<double> ms;  // by death: from it until the last of the others has heard of it
  int num_wrong = 0;
  int num_hung = 0;
};
[[nodiscard]] GroupOfDeaths run_deaths(const GpuDeaths& deaths);

}  // namespace weft::test
