// SPDX-License-Identifier: Apache-2.0
#include "train/layers/adamw.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "train/config.hpp"
#include "weft/error.hpp"

namespace weft::moe {
namespace {

TEST(AdamwTest, FollowsTheFormulaOverSeveralSteps) {
  const double beta1 = 0.9;
  const double beta2 = 0.99;
  const double rate = 0.1;
  const double decay = 0.05;
  std::vector<float> value = {1.0F};
  AdamMoments moments(1);
  double expected = 1.0;
  double mean = 0;
  double square = 0;
  for (int step = 1; step <= 5; ++step) {
    const double grad = 0.3 * step - 1.0;
    mean = beta1 * mean + (1 - beta1) * grad;
    square = beta2 * square + (1 - beta2) * grad * grad;
    const double bias1 = 1 - std::pow(beta1, step);
    const double bias2 = 1 - std::pow(beta2, step);
    expected -= rate * (mean / bias1 / (std::sqrt(square / bias2) + 1e-8) + decay * expected);
    const std::vector<float> grads = {static_cast<float>(grad)};
    const AdamStep adam = {
        static_cast<float>(rate),
        static_cast<float>(beta1),
        static_cast<float>(beta2),
        1e-8F,
        static_cast<float>(decay),
        static_cast<float>(bias1),
        static_cast<float>(bias2)};
    adamw_update(adam, value, grads, moments, 0, 1);
    EXPECT_NEAR(static_cast<double>(value[0]), expected, 1e-5) << "step " << step;
  }
}

TEST(AdamwTest, LeavesElementsOutsideTheRangeAlone) {
  std::vector<float> value = {1.0F, 1.0F, 1.0F};
  const std::vector<float> grad = {1.0F, 1.0F, 1.0F};
  AdamMoments moments(3);
  adamw_update({.learning_rate = 0.1F, .beta1 = 0.9F, .beta2 = 0.9F}, value, grad, moments, 1, 2);
  EXPECT_EQ(value[0], 1.0F);
  EXPECT_LT(value[1], 1.0F);
  EXPECT_EQ(value[2], 1.0F);
}

TEST(LearningRateTest, WarmsUpAndStaysConstant) {
  const TrainConfig config = {.learning_rate = 1.0F, .warmup_steps = 10};
  EXPECT_FLOAT_EQ(learning_rate_at(config, 0), 0.1F);
  EXPECT_FLOAT_EQ(learning_rate_at(config, 9), 1.0F);
  EXPECT_FLOAT_EQ(learning_rate_at(config, 100000), 1.0F);
}

}  // namespace
}  // namespace weft::moe
