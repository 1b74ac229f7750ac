// SPDX-License-Identifier: Apache-2.0
// Plans with replicas (PlanOptions::balance): the bits of the reference over every transport, and
// with sums by choice those of the plan without replicas.
#include <gtest/gtest.h>

#include <algorithm>

#include "multirank/transport_cases.hpp"

namespace weft::test {
namespace {

class BalancedTest : public TransportCasesTest {
 protected:
  BalancedTest() { setup_.max_tokens = 90; }
};

TEST_P(BalancedTest, GivesTheBitsOfTheReference) {
  for (const int num_threads : {1, 3}) {
    setup_.num_threads = num_threads;
    std::vector<CaseData> cases;
    for (uint64_t seed = 1; seed <= 12; ++seed) {
      cases.push_back(make_case_data(setup_, balanced_case(setup_, seed)));
    }
    EXPECT_EQ(run_cases_on_threads(cases), "");
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    BalancedTest,
    testing::Combine(
        testing::Values(
            "loopback",
            "shm",
            "faulty:loopback?seed=3&delay=0.2&reorder=0.5&hide_mapped=1&hold_us=200"
        ),
        testing::Values(
            std::vector{0},
            std::vector{0, 0, 0, 0},
            std::vector{0, 0, 1, 1},
            std::vector{0, 1, 0, 1, 1}
        ),
        testing::Values(FanOut::kSource, FanOut::kReceiver)
    ),
    test_name
);

// All tokens choose the same experts, which lie on one rank: the others take their share.
TEST(BalancedPlanTest, IsMoreEven) {
  ExchangeSetup setup;
  setup.num_ranks = 4;
  Case spec;
  spec.num_tokens = {30, 10, 0, 24};
  spec.experts = {0, 1};
  spec.balance = {.replicas = 1};
  const CaseData data = make_case_data(setup, spec);
  run_threads(4, [&](const Group& group) {
    Exchange exchange = make_exchange(group, setup);
    const RankRouting& routing = data.routing[static_cast<size_t>(group.rank())];
    const Plan plan = exchange.plan(routing.routing(), routing.options);
    EXPECT_EQ(plan.num_experts(), 8);
    EXPECT_EQ(plan.num_local_experts(), 3);
    EXPECT_EQ(plan.num_physical_experts(), 12);
    EXPECT_EQ(plan.num_replicas(), 1);
    EXPECT_EQ(plan.load().unbalanced, 128);
    EXPECT_EQ(plan.load().busiest, 32);
    EXPECT_EQ(plan.load().mean, 32);
    EXPECT_EQ(plan.placement()[0], -1);
    EXPECT_EQ(std::ranges::count(plan.placement(), -1), 1);
    EXPECT_EQ(plan.routes_per_expert(), (std::vector<int64_t>{64, 64, 0, 0, 0, 0, 0, 0}));
    EXPECT_EQ(Plan::from_json(plan.to_json()), plan);
    EXPECT_EQ(Plan::from_json(plan.to_json()).load().unbalanced, 128);
  });
}

}  // namespace
}  // namespace weft::test
