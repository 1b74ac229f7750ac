// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/layout/plan.hpp"
#include "plan/plan_data.hpp"

namespace weft {
namespace {

TEST(DevicePlanTest, HasThePlacesOfAPlanWithoutReplicas) {
  const PlanMap map = {4, 24, 100, 8};
  EXPECT_EQ(map.num_experts, 24U);
  EXPECT_EQ(map.placement, map.route_expert);  // it takes no room
  EXPECT_LE(map.num_bytes(), PlanMap(4, 24, 100, 8, kMostReplicas).num_bytes());
}

TEST(DevicePlanTest, HasTheSamePlacesInBothHalvesOfAPlan) {
  const PlanMap map = {4, 24, 100, 8, 3};
  const PlanMap chosen = map.of_chosen();
  EXPECT_EQ(map.num_experts, 36U);
  EXPECT_EQ(map.experts_per_rank.divisor(), 9U);
  EXPECT_EQ(chosen.num_experts, 24U);
  EXPECT_EQ(chosen.experts_per_rank.divisor(), 6U);
  EXPECT_EQ(chosen.route_expert, map.route_expert);
  EXPECT_EQ(chosen.route_weight, map.route_weight);
  EXPECT_EQ(chosen.num_bytes(), map.num_bytes());
  EXPECT_GE(map.route_expert, map.placement + sizeof(int32_t) * 4 * 3);
  EXPECT_GE(map.shape_bytes(), map.placement + sizeof(int32_t) * 4 * 3);
}

// The device finds the same expert as the host, for masters and for replicas.
TEST(DevicePlanTest, KnowsTheExpertOfAPlace) {
  for (const int replicas : {0, 1, 3}) {
    const PlanMap map = {3, 12, 5, 2, static_cast<uint32_t>(replicas)};
    std::vector<std::byte> bytes(map.num_bytes());
    const PlanView plan = {bytes.data(), map};
    PlanShape shape;
    shape.num_ranks = 3;
    shape.num_experts = static_cast<int>(map.num_experts);
    shape.options.balance.replicas = replicas;
    for (int i = 0; i < 3 * replicas; ++i) {
      plan.placement()[i] = (i * 5 + 7) % 12;
      shape.options.balance.placement.push_back(plan.placement()[i]);
    }
    for (int32_t physical = 0; physical < shape.num_experts; ++physical) {
      EXPECT_EQ(plan.chosen_expert(physical), expert_of(shape, physical)) << physical;
    }
  }
}

}  // namespace
}  // namespace weft
