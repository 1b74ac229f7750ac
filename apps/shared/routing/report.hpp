// SPDX-License-Identifier: Apache-2.0
// Report of what one routing means for every rank: rows, bytes, imbalance; as text, as pictures, as
// JSON.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "plan/build.hpp"
#include "report/html.hpp"
#include "report/table.hpp"
#include "weft/plan.hpp"

namespace weft::program {

// max / mean, 1 = even.
struct Imbalance {
  double of_experts = 0;  // routes of each expert
  double of_ranks = 0;    // routes of each rank's experts
};

struct RowFormat {
  DType dtype = DType::kBFloat16;
  int64_t hidden = 7168;
};

struct PlanReport {
  std::string source;  // "steps.wrt, step 12, block 0", or how the routing was made
  RowFormat format;
  std::vector<Plan> plans;  // by rank
  Imbalance imbalance;
  int64_t num_routes = 0;                 // of all ranks
  int64_t num_arrivals = 0;               // (token, rank) pairs, a rank's own included
  std::vector<int64_t> routes_by_source;  // [num_ranks, num_experts]
  std::vector<int64_t> sent_bytes;        // [num_ranks, num_ranks] from, to; own rows included

  [[nodiscard]] int64_t row_bytes() const { return format.hidden * dtype_bytes(format.dtype); }
  [[nodiscard]] int num_ranks() const { return static_cast<int>(plans.size()); }
  [[nodiscard]] int num_experts() const { return plans.front().num_experts(); }
};

// Throws what build_plans throws for options that do not fit the routing.
[[nodiscard]] PlanReport make_plan_report(
    std::string source,
    const std::vector<RouteTable>& routes,
    int num_experts,
    const PlanOptions& options,
    const RowFormat& format
);

// The routes of all tokens of a rank, by expert.
[[nodiscard]] std::vector<int64_t> routes_of(const RouteTable& table, int num_experts);
[[nodiscard]] Imbalance imbalance_of(const std::vector<int64_t>& routes_per_expert, int num_ranks);
[[nodiscard]] double max_over_mean(const std::vector<int64_t>& counts);

[[nodiscard]] std::string plan_summary(const PlanReport& report);  // a few lines
[[nodiscard]] Table plan_rank_table(const PlanReport& report);
// Routes from each rank to each expert in shades of text, and the busiest experts.
[[nodiscard]] std::string plan_picture(const PlanReport& report);

// With `with_slots` also topk_idx, route_slots and the rows of every rank, for other programs.
[[nodiscard]] nlohmann::ordered_json plan_json(const PlanReport& report, bool with_slots);
void add_plan_figures(const PlanReport& report, Page& page);

}  // namespace weft::program
