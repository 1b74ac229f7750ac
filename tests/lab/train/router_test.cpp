// SPDX-License-Identifier: Apache-2.0
#include "train/layers/router.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "gradient_check.hpp"

namespace weft::moe {
namespace {

constexpr int kTokens = 6;
constexpr int kHidden = 8;
constexpr int kExperts = 5;

using Indices = std::vector<int32_t>;

TEST(RouterTest, GivesTiesToTheLowerIndex) {
  OwnedParameter weight(kExperts * kHidden, 1);
  std::ranges::fill(weight.value, 0.0F);
  Router router(weight.get(), kExperts, 3);
  router.forward(random_matrix(1, kHidden, 2), one_shard(1));
  EXPECT_EQ(router.topk_idx(), (Indices{0, 1, 2}));
  for (int k = 0; k < 3; ++k) {
    EXPECT_FLOAT_EQ(router.weights().row(0)[k], 1.0F / 3.0F);
  }
}

TEST(RouterTest, OrdersExpertsByProbability) {
  // One input element: the logits are the weights themselves.
  OwnedParameter weight(kExperts, 1);
  weight.value = {0.0F, 2.0F, 1.0F, 2.0F, -1.0F};
  Router router(weight.get(), kExperts, 3);
  Matrix x(1, 1);
  x.data()[0] = 1.0F;
  router.forward(x, one_shard(1));
  EXPECT_EQ(router.topk_idx(), (Indices{1, 3, 2}));
  const float* w = router.weights().row(0);
  EXPECT_FLOAT_EQ(w[0] + w[1] + w[2], 1.0F);
  EXPECT_FLOAT_EQ(w[2] / w[0], std::exp(-1.0F));
}

TEST(RouterTest, ChoosesDistinctLegalExpertsEvenForNotANumber) {
  OwnedParameter weight(kExperts, 1);
  std::ranges::fill(weight.value, std::numeric_limits<float>::quiet_NaN());
  Router router(weight.get(), kExperts, 2);
  router.forward(random_matrix(1, 1, 2), one_shard(1));
  EXPECT_EQ(router.topk_idx(), (Indices{0, 1}));
}

TEST(RouterTest, KeepsTheProbabilityAsWeightOfASingleExpert) {
  OwnedParameter weight(kExperts * kHidden, 3);
  Router router(weight.get(), kExperts, 1);
  router.forward(random_matrix(kTokens, kHidden, 4), one_shard(kTokens));
  for (int t = 0; t < kTokens; ++t) {
    EXPECT_LT(router.weights().row(t)[0], 1.0F);
    EXPECT_EQ(
        router.weights().row(t)[0], router.probs().row(t)[router.topk_idx()[static_cast<size_t>(t)]]
    );
  }
}

class RouterGradientTest : public testing::TestWithParam<int> {};

TEST_P(RouterGradientTest, MatchesDifferences) {
  const int topk = GetParam();
  Matrix x = random_matrix(kTokens, kHidden, 5);
  OwnedParameter weight(kExperts * kHidden, 6, 1.5F);
  const Matrix probe = random_matrix(kTokens, topk, 7);
  const auto per_prob = random_values(kExperts, 8);
  Router router(weight.get(), kExperts, topk);
  const auto loss = [&] {
    router.forward(x, one_shard(kTokens));
    double sum = dot(router.weights().span(), probe.span());
    for (int t = 0; t < kTokens; ++t) {
      sum += dot({router.probs().row(t), kExperts}, per_prob);
    }
    return sum;
  };
  loss();
  Matrix grad_x(kTokens, kHidden);
  router.backward(x, probe, per_prob, grad_x, one_shard(kTokens));
  expect_gradient("x", x.span(), grad_x.span(), loss);
  expect_gradient("weight", weight.value, weight.grad, loss);
}

INSTANTIATE_TEST_SUITE_P(Topk, RouterGradientTest, testing::Values(1, 2, 3));

TEST(BalanceTest, IsOneWhenEven) {
  Matrix probs(4, kExperts);
  std::ranges::fill(probs.span(), 1.0F / kExperts);
  const std::vector<int64_t> routes(kExperts, 8);
  EXPECT_NEAR(balance_loss(probs, routes, 4).share, 1.0, 1e-6);
}

TEST(BalanceTest, IsTheNumberOfExpertsWhenOneGetsAll) {
  Matrix probs(4, kExperts);
  std::ranges::fill(probs.span(), 0.0F);
  for (int t = 0; t < 4; ++t) {
    probs.row(t)[2] = 1.0F;
  }
  EXPECT_NEAR(balance_loss(probs, std::vector<int64_t>{0, 0, 8, 0, 0}, 4).share, kExperts, 1e-6);
}

TEST(BalanceTest, SharesOfTheRanksAddUpToTheWhole) {
  const Matrix probs = random_matrix(kTokens, kExperts, 9);
  const std::vector<int64_t> routes = {1, 4, 0, 5, 2};
  const double whole = balance_loss(probs, routes, kTokens).share;
  double sum = 0;
  for (const auto& [begin, count] : {std::pair{0, 1}, std::pair{1, 0}, std::pair{1, 5}}) {
    Matrix part(count, kExperts);
    std::copy_n(probs.row(begin), count * kExperts, part.data());
    sum += balance_loss(part, routes, kTokens).share;
  }
  EXPECT_NEAR(sum, whole, 1e-9);
}

TEST(BalanceTest, GradientMatchesDifferences) {
  Matrix probs = random_matrix(kTokens, kExperts, 10);
  const std::vector<int64_t> routes = {1, 4, 0, 5, 2};
  const auto loss = [&] { return balance_loss(probs, routes, kTokens).share; };
  Matrix grad(kTokens, kExperts);
  for (int t = 0; t < kTokens; ++t) {
    std::ranges::copy(balance_loss(probs, routes, kTokens).grad_probs, grad.row(t));
  }
  expect_gradient("probs", probs.span(), grad.span(), loss);
}

}  // namespace
}  // namespace weft::moe
