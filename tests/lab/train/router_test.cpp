// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "gradient_check.hpp"

namespace weft::moe {
namespace {

constexpr int kTokens = 6;
constexpr int kExperts = 5;

using Indices = std::vector<int32_t>;

// The router's choice by these logits.
struct Choice {
  std::vector<float> probs;
  Indices topk_idx;
  std::vector<float> weights;
  RouterShape shape;

  Choice(std::vector<float> logits, int topk)
      : probs(std::move(logits)),
        topk_idx(probs.size() / kExperts * static_cast<size_t>(topk)),
        weights(topk_idx.size()) {
    const auto num_tokens = static_cast<int64_t>(probs.size() / kExperts);
    shape = {num_tokens, kExperts, topk, probs.data(), topk_idx.data(), weights.data()};
    Math().choose_experts(shape);
  }
};

TEST(RouterTest, GivesTiesToTheLowerIndex) {
  const Choice choice(std::vector<float>(kExperts), 3);
  EXPECT_EQ(choice.topk_idx, (Indices{0, 1, 2}));
  for (const float weight : choice.weights) {
    EXPECT_FLOAT_EQ(weight, 1.0F / 3.0F);
  }
}

TEST(RouterTest, OrdersExpertsByProbability) {
  const Choice choice({0.0F, 2.0F, 1.0F, 2.0F, -1.0F}, 3);
  EXPECT_EQ(choice.topk_idx, (Indices{1, 3, 2}));
  const auto& w = choice.weights;
  EXPECT_FLOAT_EQ(w[0] + w[1] + w[2], 1.0F);
  EXPECT_FLOAT_EQ(w[2] / w[0], std::exp(-1.0F));
}

TEST(RouterTest, ChoosesDistinctLegalExpertsEvenForNotANumber) {
  const Choice choice(std::vector<float>(kExperts, std::numeric_limits<float>::quiet_NaN()), 2);
  EXPECT_EQ(choice.topk_idx, (Indices{0, 1}));
}

TEST(RouterTest, KeepsTheProbabilityAsWeightOfASingleExpert) {
  const Choice choice(random_values(kTokens * kExperts, 4), 1);
  for (size_t t = 0; t < kTokens; ++t) {
    EXPECT_LT(choice.weights[t], 1.0F);
    const auto chosen = static_cast<size_t>(choice.topk_idx[t]);
    EXPECT_EQ(choice.weights[t], choice.probs[t * kExperts + chosen]);
  }
}

class RouterGradientTest : public testing::TestWithParam<int> {};

TEST_P(RouterGradientTest, MatchesDifferences) {
  const int topk = GetParam();
  auto logits = random_values(kTokens * kExperts, 5, 1.5F);
  const auto probe = random_values(static_cast<size_t>(kTokens * topk), 7);
  const auto per_prob = random_values(kExperts, 8);
  const auto loss = [&] {
    const Choice choice(logits, topk);
    double sum = dot(choice.weights, probe);
    for (size_t t = 0; t < kTokens; ++t) {
      sum += dot(std::span(choice.probs).subspan(t * kExperts, kExperts), per_prob);
    }
    return sum;
  };
  std::vector<float> grad(logits.size());
  const Choice choice(logits, topk);
  Math().router_backward(choice.shape, probe.data(), per_prob.data(), grad.data());
  expect_gradient("logits", logits, grad, loss);
}

INSTANTIATE_TEST_SUITE_P(Topk, RouterGradientTest, testing::Values(1, 2, 3));

// A rank's part of the loss, by the probabilities of its tokens.
double share_of(
    std::span<const float> probs, const std::vector<int64_t>& routes, int64_t global_tokens
) {
  std::vector<double> sums(kExperts);
  const auto num_tokens = static_cast<int64_t>(probs.size() / kExperts);
  Math().column_sums(probs.data(), num_tokens, kExperts, sums.data());
  const std::vector<double> grads = balance_gradients(routes, global_tokens);
  return balance_share(std::span(grads), std::span<const double>(sums));
}

TEST(BalanceTest, IsOneWhenEven) {
  const std::vector<float> probs(4 * kExperts, 1.0F / kExperts);
  EXPECT_NEAR(share_of(probs, std::vector<int64_t>(kExperts, 8), 4), 1.0, 1e-6);
}

TEST(BalanceTest, IsTheNumberOfExpertsWhenOneGetsAll) {
  std::vector<float> probs(4 * kExperts);
  for (size_t t = 0; t < 4; ++t) {
    probs[t * kExperts + 2] = 1.0F;
  }
  EXPECT_NEAR(share_of(probs, {0, 0, 8, 0, 0}, 4), kExperts, 1e-6);
}

TEST(BalanceTest, SharesOfTheRanksAddUpToTheWhole) {
  const auto probs = random_values(kTokens * kExperts, 9);
  const std::vector<int64_t> routes = {1, 4, 0, 5, 2};
  double sum = 0;
  for (const auto& [begin, count] : {std::pair{0, 1}, std::pair{1, 0}, std::pair{1, 5}}) {
    const auto first = static_cast<size_t>(begin * kExperts);
    const auto part = std::span(probs).subspan(first, static_cast<size_t>(count * kExperts));
    sum += share_of(part, routes, kTokens);
  }
  EXPECT_NEAR(sum, share_of(probs, routes, kTokens), 1e-9);
}

TEST(BalanceTest, GradientMatchesDifferences) {
  auto probs = random_values(kTokens * kExperts, 10);
  const std::vector<int64_t> routes = {1, 4, 0, 5, 2};
  const auto loss = [&] { return share_of(probs, routes, kTokens); };
  std::vector<float> grad;
  for (int t = 0; t < kTokens; ++t) {
    const std::vector<double> of_token = balance_gradients(routes, kTokens);
    grad.insert(grad.end(), of_token.begin(), of_token.end());
  }
  expect_gradient("probs", probs, grad, loss);
}

}  // namespace
}  // namespace weft::moe
