// SPDX-License-Identifier: Apache-2.0
// Groups and routing that the tests of the simulation share.
#pragma once

#include <vector>

#include "plan/build.hpp"
#include "plan/random_routing.hpp"
#include "simulate/simulate.hpp"
#include "simulate/traffic.hpp"

namespace weft::sim {

// 24 ranks in domains of 4, 48 experts, top-4, 200 tokens of 256 B.
[[nodiscard]] Scenario small_scenario();

struct RoutingChoice {
  double skew = 0;
  double hole_fraction = 0;
  bool repeat_experts = false;
  bool has_uneven_tokens = false;  // rank r has max_tokens * r / num_ranks, rank 0 none
  uint64_t seed = 1;
};

[[nodiscard]] std::vector<RouteTable> make_routes(
    const Scenario& scenario, const RoutingChoice& choice = {}
);

// Rates and costs in round numbers, nothing that hides another.
[[nodiscard]] Model plain_model();

}  // namespace weft::sim
