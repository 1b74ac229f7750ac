// SPDX-License-Identifier: Apache-2.0
#include "simulate/step.hpp"

#include <gtest/gtest.h>

#include "simulate_cases.hpp"

namespace weft::sim {
namespace {

// Two domains of two ranks with two experts each; every token of 1,000 on a rank has one route.
Scenario four_ranks() {
  return {
      .num_ranks = 4,
      .ranks_per_domain = 2,
      .num_experts = 8,
      .topk = 1,
      .max_tokens = 1000,
      .row_bytes = 256};
}

std::vector<RouteTable> all_to(const Scenario& scenario, int32_t expert) {
  std::vector<RouteTable> routes = make_routes(scenario);
  for (RouteTable& table : routes) {
    std::ranges::fill(table.expert, expert);
  }
  return routes;
}

// Returns a shape in which the products of a row take a microsecond forward.
StepShape plain_shape() {
  StepShape shape;
  shape.replicas = 1;
  shape.hidden = 128;
  shape.width = 1000;
  shape.tflops = shape.row_flop() / 1e6;
  shape.token_mflop = shape.tflops;  // likewise of a token
  shape.plan_us = 7;
  return shape;
}

TEST(StepTest, TakesRowsWeightsAndTheRest) {
  const Scenario scenario = four_ranks();
  const auto routes = all_to(scenario, 0);
  const BalancedStep step =
      simulate_step(scenario, plain_model(), routes, make_routes(scenario), plain_shape());
  EXPECT_EQ(step.num_ranks, 4);
  EXPECT_EQ(step.routed.busiest_of_mean, 4);
  EXPECT_EQ(step.routed.copies, 0);
  EXPECT_DOUBLE_EQ(step.routed.products_us, 3 * 4000);
  EXPECT_DOUBLE_EQ(step.routed.rest_us, 3 * 1000);
  EXPECT_EQ(step.routed.weights_us, 0);
  EXPECT_EQ(step.routed.exposed_us, 0);

  // Rank 0 sends its expert to each other one, two of them behind the card.
  EXPECT_EQ(step.balanced.copies, 3);
  EXPECT_LE(step.balanced.busiest_of_mean, 1.001);
  EXPECT_DOUBLE_EQ(step.balanced.products_us, 3 * 1000 * step.balanced.busiest_of_mean);
  const double once = 768'000 * (1 / 100e3 + 2 / 10e3);  // B over GB/s
  EXPECT_NEAR(step.balanced.weights_us, 4 * once, 1e-9);
  // The others have no rows but those of the replicas, but something to do while gradients return.
  EXPECT_NEAR(step.balanced.exposed_us, 2 * once, 1e-9);
  EXPECT_DOUBLE_EQ(step.balanced.us_if_not_hidden(), step.balanced.us() - 2 * once + 4 * once);
  EXPECT_EQ(step.even.busiest_of_mean, 1);
  EXPECT_DOUBLE_EQ(step.even.products_us, 3 * 1000);
}

TEST(StepTest, WithoutReplicasOnlyThePlanIsLonger) {
  const Scenario scenario = small_scenario();
  const auto routes = make_routes(scenario, {.skew = 1});
  StepShape shape = plain_shape();
  shape.replicas = 0;
  const BalancedStep step =
      simulate_step(scenario, plain_model(), routes, make_routes(scenario), shape);
  EXPECT_GT(step.routed.busiest_of_mean, 1.2);
  EXPECT_EQ(step.balanced.busiest_of_mean, step.routed.busiest_of_mean);
  EXPECT_DOUBLE_EQ(step.balanced.us(), step.routed.us() + 7);
}

TEST(StepTest, BalancesAnUnevenRouting) {
  const Scenario scenario = small_scenario();
  const auto routes = make_routes(scenario, {.skew = 1});
  const BalancedStep step =
      simulate_step(scenario, plain_model(), routes, make_routes(scenario), plain_shape());
  EXPECT_LE(step.balanced.busiest_of_mean, 1.1);
  EXPECT_LT(step.balanced.products_us, step.routed.products_us);
  EXPECT_GE(step.balanced.us_if_not_hidden(), step.balanced.us());
  EXPECT_LT(step.even.us(), step.balanced.us());
}

}  // namespace
}  // namespace weft::sim
