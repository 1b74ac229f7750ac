// SPDX-License-Identifier: Apache-2.0
#include "plan_report.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace weft::program {
namespace {

std::vector<int64_t> routes_of(const RouteTable& table, int num_experts) {
  std::vector<int64_t> counts(static_cast<size_t>(num_experts), 0);
  for (const int32_t expert : table.expert) {
    if (expert >= 0) {
      ++counts[static_cast<size_t>(expert)];
    }
  }
  return counts;
}

}  // namespace

double max_over_mean(const std::vector<int64_t>& counts) {
  const auto sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (sum == 0) {
    return 1;
  }
  const int64_t largest = *std::max_element(counts.begin(), counts.end());
  return static_cast<double>(largest) * static_cast<double>(counts.size()) /
         static_cast<double>(sum);
}

Imbalance imbalance_of(const std::vector<int64_t>& routes_per_expert, int num_ranks) {
  std::vector<int64_t> per_rank(static_cast<size_t>(num_ranks), 0);
  const size_t num_local = routes_per_expert.size() / per_rank.size();
  for (size_t e = 0; e < routes_per_expert.size(); ++e) {
    per_rank[e / num_local] += routes_per_expert[e];
  }
  return {max_over_mean(routes_per_expert), max_over_mean(per_rank)};
}

PlanReport make_plan_report(
    std::string source,
    const std::vector<RouteTable>& routes,
    int num_experts,
    const PlanOptions& options,
    const RowFormat& format
) {
  PlanReport report;
  report.source = std::move(source);
  report.dtype = format.dtype;
  report.hidden = format.hidden;
  report.plans = build_plans(routes, num_experts, options);
  for (const RouteTable& table : routes) {
    const auto counts = routes_of(table, num_experts);
    report.routes_by_source.insert(report.routes_by_source.end(), counts.begin(), counts.end());
  }
  for (const Plan& plan : report.plans) {
    for (int to = 0; to < plan.num_ranks(); ++to) {
      report.sent_bytes.push_back(plan.sent_arrivals(to) * report.row_bytes());
      report.num_arrivals += plan.sent_arrivals(to);
    }
  }
  const auto totals = report.plans.front().global_routes_per_expert();
  report.num_routes = std::accumulate(totals.begin(), totals.end(), int64_t{0});
  report.imbalance = imbalance_of({totals.begin(), totals.end()}, report.num_ranks());
  return report;
}

}  // namespace weft::program
