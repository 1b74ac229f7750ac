// SPDX-License-Identifier: Apache-2.0
// The first half of the reference plan: which route gets which slot, by sorting. No code of the
// fast path.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/build.hpp"

namespace weft::reference {

struct Route {
  int source = 0;
  int32_t token = 0;
  int32_t k = 0;
  int expert = 0;  // of the whole group
  float weight = 0;
  int target = 0;
  int64_t slot = -1;
};

struct Problem {
  std::span<const RouteTable> tables;
  int num_experts;
  PlanOptions options;
  std::vector<int64_t> budgets;  // -1: exact
  [[nodiscard]] int num_ranks() const { return static_cast<int>(tables.size()); }
  [[nodiscard]] int experts_per_rank() const { return num_experts / num_ranks(); }
  [[nodiscard]] bool is_rank_major() const { return options.layout == Layout::kRankMajor; }
  [[nodiscard]] bool is_strided() const { return options.layout == Layout::kExpertStrided; }
};

// Every route of the group, by source, token and k.
[[nodiscard]] std::vector<Route> list_routes(const Problem& problem);
// [num_experts]
[[nodiscard]] std::vector<int64_t> rows_of_experts(
    const Problem& problem, const std::vector<Route>& routes
);
[[nodiscard]] int64_t resolved_stride(const Problem& problem, const std::vector<int64_t>& rows);

// Gives every route to the plan's rank its slot, and fills what the receiver knows.
void number_rows(const Problem& problem, std::vector<Route>& routes, PlanData& plan);

}  // namespace weft::reference
