// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <numeric>

#include "gradient_check.hpp"

namespace weft::moe {
namespace {

constexpr int kTokens = 5;
constexpr int kHidden = 8;

std::vector<uint8_t> some_bytes(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<uint8_t>(i * 37 % 256);
  }
  return bytes;
}

TEST(ProductTest, MultipliesByTheTransposedWeight) {
  const std::vector<float> x = {1, 2, 3, 4, 5, 6};   // [2, 3]
  const std::vector<float> w = {1, 0, 2, 0, 1, -1};  // [2, 3]
  std::vector<float> y(4);
  Math().forward({2, 3, 2}, x.data(), w.data(), y.data());
  EXPECT_EQ(y, (std::vector<float>{7, -1, 16, -1}));
}

TEST(ProductTest, GradientsMatchDifferences) {
  constexpr ProductShape kShape = {kTokens, kHidden, 3};
  Math math;
  auto x = random_values(kTokens * kHidden, 1);
  OwnedParameter w(3 * kHidden, 2);
  const auto probe = random_values(kTokens * 3, 3);
  const auto loss = [&] {
    std::vector<float> y(kTokens * 3);
    math.forward(kShape, x.data(), w.value.data(), y.data());
    return dot(y, probe);
  };
  std::vector<float> grad_x(x.size());
  math.backward_input(kShape, probe.data(), w.value.data(), grad_x.data());
  math.add_backward_weight(kShape, probe.data(), x.data(), w.grad.data());
  expect_gradient("x", x, grad_x, loss);
  expect_gradient("w", w.value, w.grad, loss);
}

TEST(ProductTest, AddsToGradients) {
  constexpr ProductShape kShape = {kTokens, kHidden, 2};
  Math math;
  const auto x = random_values(kTokens * kHidden, 4);
  const auto w = random_values(2 * kHidden, 6);
  const auto grad_y = random_values(kTokens * 2, 5);
  std::vector<float> once(w.size());
  std::vector<float> twice(w.size());
  std::vector<float> grad_x(x.size());
  std::vector<float> added(x.size(), 1.0F);
  math.add_backward_weight(kShape, grad_y.data(), x.data(), once.data());
  math.add_backward_weight(kShape, grad_y.data(), x.data(), twice.data());
  math.add_backward_weight(kShape, grad_y.data(), x.data(), twice.data());
  math.backward_input(kShape, grad_y.data(), w.data(), grad_x.data());
  math.add_backward_input(kShape, grad_y.data(), w.data(), added.data());
  for (size_t i = 0; i < once.size(); ++i) {
    EXPECT_NEAR(twice[i], 2 * once[i], 1e-5F);
  }
  for (size_t i = 0; i < grad_x.size(); ++i) {
    EXPECT_EQ(added[i], grad_x[i] + 1.0F);
  }
}

TEST(ProductTest, AcceptsZeroRows) {
  std::vector<float> w(kHidden * 2, 1.0F);
  std::vector<float> grad_w(kHidden * 2, 3.0F);
  Math math;
  math.forward({0, kHidden, 2}, nullptr, w.data(), nullptr);
  math.add_backward_weight({0, kHidden, 2}, nullptr, nullptr, grad_w.data());
  EXPECT_EQ(grad_w, std::vector<float>(kHidden * 2, 3.0F));
}

struct NormFixture : testing::Test {
  Math math;
  std::vector<float> x = random_values(kTokens * kHidden, 8);
  OwnedParameter gain{kHidden, 9};
  std::vector<float> inverse_rms = std::vector<float>(kTokens);
  std::vector<float> y = std::vector<float>(kTokens * kHidden);

  NormShape forward() {
    const NormShape shape = {kTokens, kHidden, x.data(), gain.value.data(), inverse_rms.data()};
    math.norm(shape, y.data());
    return shape;
  }
};

using RmsNormTest = NormFixture;

TEST_F(RmsNormTest, GivesRowsOfUnitMeanSquare) {
  std::ranges::fill(gain.value, 1.0F);
  forward();
  for (size_t t = 0; t < kTokens; ++t) {
    const auto row = std::span(y).subspan(t * kHidden, kHidden);
    EXPECT_NEAR(dot(row, row) / kHidden, 1.0, 1e-4);
  }
}

TEST_F(RmsNormTest, GradientsMatchDifferences) {
  const auto probe = random_values(kTokens * kHidden, 10);
  const auto loss = [&] {
    forward();
    return dot(y, probe);
  };
  std::vector<float> grad_x(x.size());
  math.norm_backward(forward(), probe.data(), grad_x.data(), gain.get(), one_shard(kTokens));
  expect_gradient("x", x, grad_x, loss);
  expect_gradient("gain", gain.value, gain.grad, loss);
}

TEST(EmbeddingTest, SumsTheVectorsOfTheWindow) {
  const int window = 2;
  OwnedParameter table(static_cast<size_t>(window * kNumBytes * kHidden), 11);
  const std::vector<uint8_t> windows = {3, 255};
  std::vector<float> x(kHidden);
  Math().embed({1, window, kHidden, windows.data()}, table.value.data(), x.data());
  for (size_t h = 0; h < kHidden; ++h) {
    const float expected =
        table.value[3 * kHidden + h] + table.value[(kNumBytes + 255) * kHidden + h];
    EXPECT_EQ(x[h], expected);
  }
}

TEST(EmbeddingTest, GradientsMatchDifferences) {
  const int window = 3;
  OwnedParameter table(static_cast<size_t>(window * kNumBytes * kHidden), 12);
  const auto windows = some_bytes(kTokens * window);
  const EmbeddingShape shape = {kTokens, window, kHidden, windows.data()};
  const auto probe = random_values(kTokens * kHidden, 13);
  Math math;
  const auto loss = [&] {
    std::vector<float> x(kTokens * kHidden);
    math.embed(shape, table.value.data(), x.data());
    return dot(x, probe);
  };
  math.embed_backward(shape, probe.data(), table.get(), one_shard(kTokens));
  expect_gradient("table", table.value, table.grad, loss, 300);
  // The first window's first byte, certainly present.
  expect_gradient(
      "vector", std::span(table.value).first(kHidden), std::span(table.grad).first(kHidden), loss
  );
}

// The sum of the tokens' losses times the scale; turns the logits into its gradient.
double loss_of(std::vector<float>& logits, const std::vector<uint8_t>& targets, float scale) {
  const auto num_tokens = static_cast<int64_t>(targets.size());
  const std::vector<float> before = logits;
  std::vector<double> losses(targets.size());
  Math().cross_entropy(
      {num_tokens, kNumBytes, before.data(), targets.data(), scale}, losses.data(), logits.data()
  );
  return std::reduce(losses.begin(), losses.end()) * static_cast<double>(scale);
}

TEST(LossTest, IsTheLogarithmOfTheNumberOfBytesWhenNothingIsKnown) {
  std::vector<float> logits(2 * kNumBytes, 0.5F);
  EXPECT_NEAR(loss_of(logits, some_bytes(2), 0.5F), 8 * std::numbers::ln2, 1e-5);
}

TEST(LossTest, StaysFiniteForHopelessLogits) {
  std::vector<float> logits(kNumBytes);
  logits[7] = 1e4F;
  EXPECT_NEAR(loss_of(logits, {1}, 1.0F), 1e4, 1);
}

TEST(LossTest, GradientsMatchDifferences) {
  auto logits = random_values(kTokens * kNumBytes, 14);
  const auto targets = some_bytes(kTokens);
  const auto loss = [&] {
    auto copy = logits;
    return loss_of(copy, targets, 0.2F);
  };
  auto grad = logits;
  loss_of(grad, targets, 0.2F);
  expect_gradient("logits", logits, grad, loss, 300);
}

// Gradients of tokens [0, 2) and [2, 5), kept apart, against those of all tokens.
TEST_F(NormFixture, EachShardGetsTheGradientsOfItsOwnTokens) {
  const auto probe = random_values(kTokens * kHidden, 22);
  const NormShape shape = forward();
  std::vector<float> grad_x(x.size());
  std::vector<float> grads(2 * kHidden);
  math.norm_backward(
      shape,
      probe.data(),
      grad_x.data(),
      {gain.value.data(), grads.data(), kHidden},
      {{0, 2}, {2, kTokens}}
  );
  std::vector<float> of_first(kHidden);
  math.norm_backward(shape, probe.data(), grad_x.data(), {nullptr, of_first.data()}, {{0, 2}});
  std::vector<float> of_second(kHidden);
  math.norm_backward(
      shape, probe.data(), grad_x.data(), {nullptr, of_second.data()}, {{2, kTokens}}
  );
  of_first.insert(of_first.end(), of_second.begin(), of_second.end());
  EXPECT_EQ(grads, of_first);
}

}  // namespace
}  // namespace weft::moe
