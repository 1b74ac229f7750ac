// SPDX-License-Identifier: Apache-2.0
#include "plan/build.hpp"

namespace weft {
namespace {

void check_tables(
    std::span<const RouteTable> routes, int num_experts, std::span<const int64_t> row_budgets
) {
  const Context nobody;
  const auto num_ranks = static_cast<int>(routes.size());
  WEFT_CHECK_ARG(nobody, num_ranks > 0, "plan: no rank's routing is given (at least one)");
  WEFT_CHECK_ARG(
      nobody,
      num_experts > 0 && num_experts % num_ranks == 0,
      "plan: num_experts = {} is not a positive multiple of num_ranks = {}",
      num_experts,
      num_ranks
  );
  WEFT_CHECK_ARG(
      nobody,
      row_budgets.empty() || row_budgets.size() == routes.size(),
      "plan: {} row budgets for {} ranks",
      row_budgets.size(),
      num_ranks
  );
  for (size_t rank = 1; rank < routes.size(); ++rank) {
    WEFT_CHECK_ARG(
        nobody,
        routes[rank].topk == routes[0].topk,
        "plan: topk = {} on rank {} ({} on rank 0)",
        routes[rank].topk,
        rank,
        routes[0].topk
    );
  }
}

}  // namespace

std::vector<Plan> build_plans(
    std::span<const RouteTable> routes,
    int num_experts,
    const PlanOptions& options,
    std::span<const int64_t> row_budgets
) {
  check_tables(routes, num_experts, row_budgets);
  const auto num_ranks = static_cast<int>(routes.size());
  std::vector<PlanOptions> options_of(routes.size(), options);
  std::vector<RankCounts> counts;
  for (size_t rank = 0; rank < routes.size(); ++rank) {
    if (!row_budgets.empty()) {
      options_of[rank].row_budget.reset();
      if (row_budgets[rank] >= 0) {
        options_of[rank].row_budget = row_budgets[rank];
      }
    }
    check_options(options_of[rank], {});
    counts.push_back(count_routes(routes[rank], num_experts, num_ranks, options_of[rank]));
  }

  std::vector<PlanData> plans;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto r = static_cast<size_t>(rank);
    plans.push_back(place_routes(routes[r], counts, rank, options_of[r], {}));
  }
  std::vector<Plan> finished;
  for (size_t to = 0; to < plans.size(); ++to) {
    std::vector<Arrivals> received;
    for (const PlanData& from : plans) {
      received.push_back(from.sent[to]);
    }
    add_received(plans[to], std::move(received));
  }
  for (PlanData& plan : plans) {
    finished.emplace_back(std::make_shared<const PlanData>(std::move(plan)));
  }
  return finished;
}

}  // namespace weft
