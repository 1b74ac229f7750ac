// SPDX-License-Identifier: Apache-2.0
#include "moe/replicated_vector.hpp"

#include <gtest/gtest.h>

#include "weft/group.hpp"

namespace weft::moe {
namespace {

float value_at(size_t i, int rank) {
  return static_cast<float>(i % 97) + 100.0F * static_cast<float>(rank);
}

// Sizes around a row of 1024 elements, some with fewer rows than ranks.
class ReplicatedVectorTest : public testing::TestWithParam<std::pair<int, size_t>> {};

TEST_P(ReplicatedVectorTest, AddsTheGradientsAtTheOwnerAndGathersTheValues) {
  const int num_ranks = GetParam().first;
  const size_t size = GetParam().second;
  run_threads(num_ranks, [&](Group& group) {
    TrainConfig config;
    config.timeout = std::chrono::seconds(20);
    ReplicatedVector vector(group, size, config);
    for (size_t i = 0; i < size; ++i) {
      vector.all().grad[i] = value_at(i, group.rank());
    }
    vector.reduce();
    const Parameter own = vector.own();
    for (size_t i = 0; i < own.grad.size(); ++i) {
      float sum = 0.0F;
      for (int rank = 0; rank < num_ranks; ++rank) {
        sum += value_at(vector.own_begin() + i, rank);
      }
      ASSERT_EQ(own.grad[i], sum) << i;
      own.value[i] = static_cast<float>(vector.own_begin() + i);
    }
    vector.broadcast();
    ASSERT_EQ(vector.all().value.size(), size);
    for (size_t i = 0; i < size; ++i) {
      ASSERT_EQ(vector.all().value[i], static_cast<float>(i));
    }
    EXPECT_EQ(vector.traffic().calls, 2);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes,
    ReplicatedVectorTest,
    testing::Values(
        std::pair{1, size_t{5}},
        std::pair{2, size_t{5000}},
        std::pair{4, size_t{1024}},
        std::pair{4, size_t{5 * 1024 + 1}},
        std::pair{8, size_t{3000}}
    )
);

}  // namespace
}  // namespace weft::moe
