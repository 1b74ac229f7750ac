// SPDX-License-Identifier: Apache-2.0
// One exchange of any size: counts for all ranks, times, memory and messages of the busiest.
#pragma once

#include <functional>
#include <span>

#include "simulate/memory.hpp"
#include "simulate/model.hpp"
#include "simulate/replay.hpp"
#include "simulate/traffic.hpp"

namespace weft::sim {

struct Simulation {
  Scenario scenario;
  Traffic traffic;
  RankTraffic mean;      // over the ranks, rounded
  RankTraffic most;      // each number of the rank that has most of it
  int busiest_rank = 0;  // of links, cards and copies together
  int num_replayed = 0;  // domains whose links and copies are replayed
  Memory memory;         // of the busiest rank
  ControlCost control;   // likewise
  ReplayTimes dispatch_rows;
  ReplayTimes combine_rows;
  double dispatch_us = 0;  // with words and what every call costs
  double combine_us = 0;
};

// Parts of chunks that are replayed at most; where there would be more, only the domain of the
// busiest rank is replayed in full, and of the others their cards.
inline constexpr int64_t kMostParts = int64_t{1} << 22;

// `routes` by rank. `told` hears the share of the work that is done. Throws what count_traffic()
// throws.
[[nodiscard]] Simulation simulate(
    const Scenario& scenario,
    const Model& model,
    std::span<const RouteTable> routes,
    const std::function<void(double)>& told = {},
    int64_t most_parts = kMostParts
);

}  // namespace weft::sim
