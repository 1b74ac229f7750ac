// SPDX-License-Identifier: Apache-2.0
// The slow, obvious plan of all ranks: sort every route of the group, then number the rows. Shares
// nothing with place_routes but the types; every fast path is compared with it.
#pragma once

#include <span>
#include <vector>

#include "plan/build.hpp"

namespace weft {

// Drops what does not fit, whatever options.overflow says. Replicas are those of plan_balance or
// options.balance, on ranks that are not lost; no route is to an expert without a copy there, and
// lost ranks have no routes. Throws nothing: the caller has checked.
[[nodiscard]] std::vector<PlanData> reference_plans(
    std::span<const RouteTable> routes,  // by rank
    int num_experts,
    const PlanOptions& options,
    std::span<const int64_t> row_budgets = {},  // by rank, -1: exact; empty: options.row_budget
    std::span<const int> domain_of = {},        // by rank, for replicas; empty: one domain
    std::span<const int> lost = {}              // ascending
);

}  // namespace weft
