// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "cpu/protocol/call_board.hpp"
#include "plan/build.hpp"
#include "simulate/simulate.hpp"
#include "simulate_cases.hpp"

namespace weft::sim {
namespace {

ControlCost cost_of(const Scenario& scenario, const Model& model) {
  const Traffic traffic = count_traffic(scenario, 8, make_routes(scenario));
  return control_cost(scenario, model, memory_of(scenario, traffic, 5));
}

// Records that rank 5 gets over its card: of the pairs that it carries, or of its own alone.
uint64_t far_record_bytes(const Scenario& scenario) {
  std::vector<RouteTable> routes = make_routes(scenario);
  for (RouteTable& table : routes) {
    table.weight.assign(table.expert.size(), 0.5F);
  }
  const std::vector<Plan> plans = build_plans(routes, scenario.num_experts, {});
  uint64_t bytes = 0;
  for (int source = 0; source < scenario.num_ranks; ++source) {
    const auto& sent = contents_of(plans[static_cast<size_t>(source)]).sent;
    for (int to = 4; to < 8; ++to) {  // its domain
      const bool is_wanted = scenario.is_flat ? to == 5 : scenario.forwarder(source, 1) == 5;
      if (scenario.domain_of(source) != 1 && is_wanted) {
        bytes += encode_records(sent[static_cast<size_t>(to)]).size();
      }
    }
  }
  return bytes;
}

class ControlCostTest : public testing::TestWithParam<bool> {
 protected:
  ControlCostTest() { scenario_.is_flat = GetParam(); }

  // Cheap but for what a card's messages take.
  static Model costly_messages() {
    Model model = plain_model();
    model.post_us = 1000;
    model.card_gbps = 1e6;
    model.link_gbps = 1e6;
    return model;
  }

  Scenario scenario_ = small_scenario();
};

TEST_P(ControlCostTest, RecordsCrossInOneBundleForADomain) {
  const ControlCost cost = cost_of(scenario_, costly_messages());
  const double num_messages = scenario_.is_flat ? 20 : 5;
  EXPECT_GE(cost.plan_records_us, num_messages * 1000);
  EXPECT_LT(cost.plan_records_us, num_messages * 1000 + 100);
  EXPECT_GE(cost.plan_words_us, 20'000);  // words and counts to each rank, either way
}

TEST_P(ControlCostTest, ThatManyBytesOfRecordsCross) {
  const ControlCost cost = cost_of(scenario_, plain_model());
  const auto exact = static_cast<double>(far_record_bytes(scenario_));
  const uint64_t of_rank = sizeof(CallWord) + (48 + 24) * sizeof(int32_t);
  const auto records = static_cast<double>(cost.plan_bytes_out) - static_cast<double>(20 * of_rank);
  EXPECT_NEAR(records / exact, 1, 0.05);  // records are taken to be of one length
}

INSTANTIATE_TEST_SUITE_P(
    All,
    ControlCostTest,
    testing::Bool(),
    [](const testing::TestParamInfo<bool>& param) { return param.param ? "flat" : "by_domain"; }
);

}  // namespace
}  // namespace weft::sim
