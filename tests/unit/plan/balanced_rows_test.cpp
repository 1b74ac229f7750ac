// SPDX-License-Identifier: Apache-2.0
// How many rows ranks get of plans with replicas, in budget mode: what the planner says, which is
// at most 1 % more than the least that its placement allows. WEFT_BALANCED_PLANS says how many
// random plans.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "balance_oracle.hpp"
#include "plan/plan_data.hpp"
#include "plan/reference/reference_plan.hpp"
#include "unit/plan/balance_cases.hpp"
#include "weft/plan.hpp"

namespace weft {
namespace {

TEST(BalancedRowsTest, FitIntoABudgetOfThePlannedMaximum) {
  const char* const asked = std::getenv("WEFT_BALANCED_PLANS");
  const uint64_t num_plans = asked == nullptr ? 1'000 : std::strtoull(asked, nullptr, 10);
  for (uint64_t seed = 0; seed < num_plans && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    BalanceCase c = random_balance_case(seed);
    c.options.min_rows = 1;  // the oracle knows no least number
    c.options.domain_of.clear();
    const Placement placement = c.plan().placement;
    const int64_t most = placement.busiest();
    const int64_t least = least_busiest(placement);
    EXPECT_LE(most, least + std::max<int64_t>(1, least / 100));

    PlanOptions options;
    options.pad_multiple = std::array<int64_t, 4>{1, 2, 16, 128}[seed % 4];
    options.balance = {.replicas = c.options.replicas};
    const int64_t padding = placement.shape.per_rank() * (options.pad_multiple - 1);
    const auto ranks = static_cast<size_t>(c.num_ranks);
    const std::vector<int64_t> budgets(ranks, most + padding);
    const std::vector<PlanData> plans = reference_plans(c.routes, c.num_experts, options, budgets);
    for (const PlanData& plan : plans) {
      const int64_t rows =
          std::reduce(plan.rows_per_expert.begin(), plan.rows_per_expert.end(), int64_t{0});
      EXPECT_EQ(rows, placement.rows_of_ranks()[static_cast<size_t>(plan.shape.rank)]);
      EXPECT_LE(rows, most);
      EXPECT_LE(plan.required_rows, rows + padding);
      EXPECT_FALSE(plan.overflow);
    }
  }
}

}  // namespace
}  // namespace weft
