// SPDX-License-Identifier: Apache-2.0
// Balancing as a step of a plan call: between the counts that ranks have swapped and slots, routes
// to experts become routes to physical experts. Later steps know only these.
//
//   count_routes -> [counts travel] -> balance_counts -> physical_routes, physical_counts
//   -> place_routes as in plan/build.hpp
//
// An executor that keeps routing on a GPU has kernels for the same steps; what it hands on is the
// same: indices of physical experts in place of topk_idx, and Balance::replicas() for
// PlanShape::options.
#pragma once

#include <span>
#include <vector>

#include "plan/balance/balance.hpp"
#include "plan/build.hpp"

namespace weft {

// Throws Error (kInvalidArgument) for options out of range, and for a placement that is of another
// size, or has an expert that does not exist, on its own rank or twice on a rank.
void check_balancing(
    const Balancing& balancing, int num_ranks, int num_experts, const Context& context
);

// Balances `counts` by rank and expert, by options that have been checked. `domain_of`:
// [num_ranks], or empty for one domain. Ranks that are `lost` take no rows; no rows are of experts
// without a copy elsewhere (drop_routes_to).
[[nodiscard]] Balance balance_counts(
    std::span<const RankCounts> counts,
    const Balancing& balancing,
    std::span<const int> domain_of,
    std::span<const int> lost = {}
);

// Returns `routes` of `source` with physical experts in place of experts.
[[nodiscard]] RouteTable physical_routes(RouteTable routes, const Balance& balance, int source);

// Returns `counts` by physical expert. Arrivals are zeros: only a rank's own routes tell them.
[[nodiscard]] std::vector<RankCounts> physical_counts(
    std::span<const RankCounts> counts, const Balance& balance
);

// Returns the options of a plan with this balance.
[[nodiscard]] PlanOptions resolved_options(PlanOptions options, const Balance& balance);

}  // namespace weft
