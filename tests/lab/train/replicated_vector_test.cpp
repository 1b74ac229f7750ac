// SPDX-License-Identifier: Apache-2.0
#include "train/replicated_vector.hpp"

#include <gtest/gtest.h>

#include "weft/group.hpp"

namespace weft::moe {
namespace {

float value_at(size_t i, int64_t shard) {
  return static_cast<float>(i % 97) + 100.0F * static_cast<float>(shard);
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
    const Range shards = shards_of_rank(group.rank(), num_ranks);
    vector.clear_grads();
    for (int64_t shard = shards.begin; shard < shards.end; ++shard) {
      const auto grad = vector.all().grad_of(static_cast<size_t>(shard - shards.begin));
      for (size_t i = 0; i < size; ++i) {
        grad[i] = value_at(i, shard);
      }
    }
    vector.reduce();
    const Parameter own = vector.own();
    for (size_t i = 0; i < own.grad.size(); ++i) {
      float sum = 0.0F;
      for (int64_t shard = 0; shard < num_shards(num_ranks); ++shard) {
        sum += value_at(vector.own_begin() + i, shard);
      }
      ASSERT_EQ(own.grad[i], sum) << i;
      own.value[i] = static_cast<float>(vector.own_begin() + i);
    }
    vector.broadcast();
    ASSERT_EQ(vector.all().value.size(), size);
    for (size_t i = 0; i < size; ++i) {
      ASSERT_EQ(vector.all().value[i], static_cast<float>(i));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes,
    ReplicatedVectorTest,
    testing::Values(
        std::pair{1, size_t{5}},
        std::pair{2, size_t{5000}},
        std::pair{3, size_t{7000}},
        std::pair{4, size_t{1024}},
        std::pair{4, size_t{5 * 1024 + 1}},
        std::pair{8, size_t{3000}},
        std::pair{9, size_t{20000}}
    )
);

}  // namespace
}  // namespace weft::moe
