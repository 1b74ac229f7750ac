// SPDX-License-Identifier: Apache-2.0
// Tests of what a plan tells: comparison, summary, accessors.
#include <sstream>

#include "unit/plan/plan_cases.hpp"

namespace weft {
namespace {

using testing::message_of;
using testing::sample_plans;
using testing::table_of;

TEST(PlanCompareTest, SeesEveryWeightBit) {
  RouteTable table = table_of(1, {{0}});
  table.weight = {0.0F};
  const Plan zero = build_plans(std::span(&table, 1), 1, {})[0];
  table.weight = {-0.0F};
  EXPECT_FALSE(zero == build_plans(std::span(&table, 1), 1, {})[0]);
  table.weight = {0.0F};
  EXPECT_EQ(zero, build_plans(std::span(&table, 1), 1, {})[0]);
}

TEST(PlanCompareTest, TellsLayoutsAndRoutesApart) {
  const RouteTable table = table_of(1, {{0}});
  const Plan plan = build_plans(std::span(&table, 1), 2, {})[0];
  EXPECT_FALSE(plan == build_plans(std::span(&table, 1), 2, {.layout = Layout::kRankMajor})[0]);
  const RouteTable other = table_of(1, {{1}});
  EXPECT_FALSE(plan == build_plans(std::span(&other, 1), 2, {})[0]);
}

TEST(PlanCompareTest, ForgetsWhereThePlanWasMade) {
  const Plan plan = sample_plans()[0];
  PlanData data = contents_of(plan);
  data.exchange_id = 77;
  EXPECT_EQ(plan, Plan(std::make_shared<const PlanData>(data)));
}

TEST(PlanPrintTest, SummarisesAPlan) {
  std::ostringstream out;
  out << sample_plans({.pad_multiple = 4})[0];
  EXPECT_EQ(
      out.str(),
      "plan of rank 0/2: expert_major, padded to 4\n"
      "  routing   2 tokens, top 2 of 4 experts, 2 here\n"
      "  output    8 rows, 6 with a token (8 required)\n"
      "  arrivals  3 sent, 1 of them to other ranks; 4 received, 2 from other ranks\n"
      "  experts   2 to 4 rows, 3.0 on average\n"
  );
}

TEST(PlanPrintTest, TellsOfReplicas) {
  std::ostringstream out;
  out << sample_plans({.balance = {.replicas = 1, .placement = {-1, 0}}})[1];
  EXPECT_EQ(
      out.str(),
      "plan of rank 1/2: expert_major\n"
      "  routing   3 tokens, top 2 of 4 experts, 3 here\n"
      "  output    4 rows, 4 with a token (4 required)\n"
      "  arrivals  4 sent, 2 of them to other ranks; 3 received, 1 from other ranks\n"
      "  balance   1 replicas; the busiest rank has 5 rows, 6 without them (4.5 on average)\n"
      "  experts   1 to 2 rows, 1.3 on average\n"
  );
}

TEST(PlanPrintTest, TellsOfDroppedRoutes) {
  std::ostringstream out;
  out << sample_plans({.layout = Layout::kExpertStrided, .expert_stride = 1})[1];
  EXPECT_NE(out.str().find("expert_strided, stride 1"), std::string::npos) << out.str();
  EXPECT_NE(out.str().find("were dropped"), std::string::npos) << out.str();
}

TEST(PlanAccessTest, RefusesARankOutsideTheGroup) {
  const Plan plan = sample_plans()[1];
  EXPECT_EQ(
      message_of([&] { static_cast<void>(plan.sent_arrivals(2)); }),
      "sent_arrivals: rank 2 is out of range (num_ranks = 2) [rank 1/2]"
  );
  EXPECT_EQ(
      message_of([&] { static_cast<void>(plan.received_arrivals(-1)); }),
      "received_arrivals: rank -1 is out of range (num_ranks = 2) [rank 1/2]"
  );
}

TEST(PlanAccessTest, NamesLayouts) {
  EXPECT_EQ(layout_name(Layout::kRankMajor), "rank_major");
  EXPECT_EQ(layout_name(Layout::kExpertMajor), "expert_major");
  EXPECT_EQ(layout_name(Layout::kExpertStrided), "expert_strided");
}

TEST(PlanAccessTest, TellsItsShape) {
  const Plan plan = sample_plans({.pad_multiple = 4})[1];
  EXPECT_EQ(plan.rank(), 1);
  EXPECT_EQ(plan.num_ranks(), 2);
  EXPECT_EQ(plan.num_experts(), 4);
  EXPECT_EQ(plan.num_local_experts(), 2);
  EXPECT_EQ(plan.num_tokens(), 3);
  EXPECT_EQ(plan.topk(), 2);
  EXPECT_EQ(plan.pad_multiple(), 4);
  EXPECT_EQ(plan.row_weight_cols(), 1);
  EXPECT_TRUE(plan.row_experts().empty());
  EXPECT_EQ(plan.global_routes_per_expert()[0], 4);
}

}  // namespace
}  // namespace weft
