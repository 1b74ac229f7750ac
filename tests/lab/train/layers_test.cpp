// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <numbers>

#include "gradient_check.hpp"
#include "train/layers/dense.hpp"
#include "train/layers/linear.hpp"

namespace weft::moe {
namespace {

constexpr int kTokens = 5;
constexpr int kHidden = 8;

std::vector<std::byte> some_bytes(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>(i * 37 % 256);
  }
  return bytes;
}

TEST(LinearTest, MultipliesByTheTransposedWeight) {
  const std::vector<float> x = {1, 2, 3, 4, 5, 6};   // [2, 3]
  const std::vector<float> w = {1, 0, 2, 0, 1, -1};  // [2, 3]
  Matrix y(2, 2);
  linear_forward({x.data(), 2, 3}, w.data(), rows_of(y));
  EXPECT_EQ(std::vector<float>(y.data(), y.data() + 4), (std::vector<float>{7, -1, 16, -1}));
}

TEST(LinearTest, GradientsMatchDifferences) {
  Matrix x = random_matrix(kTokens, kHidden, 1);
  OwnedParameter w(3 * kHidden, 2);
  const Matrix probe = random_matrix(kTokens, 3, 3);
  const auto loss = [&] {
    Matrix y(kTokens, 3);
    linear_forward(x, w.value.data(), rows_of(y));
    return dot(y.span(), probe.span());
  };
  Matrix grad_x(kTokens, kHidden);
  linear_backward_input(probe, w.value.data(), rows_of(grad_x));
  linear_backward_weight(probe, x, w.grad.data());
  expect_gradient("x", x.span(), grad_x.span(), loss);
  expect_gradient("w", w.value, w.grad, loss);
}

TEST(LinearTest, AddsToTheWeightGradient) {
  const Matrix x = random_matrix(kTokens, kHidden, 4);
  const Matrix grad_y = random_matrix(kTokens, 2, 5);
  std::vector<float> once(2 * kHidden);
  std::vector<float> twice(2 * kHidden);
  linear_backward_weight(grad_y, x, once.data());
  linear_backward_weight(grad_y, x, twice.data());
  linear_backward_weight(grad_y, x, twice.data());
  for (size_t i = 0; i < once.size(); ++i) {
    EXPECT_NEAR(twice[i], 2 * once[i], 1e-5F);
  }
}

TEST(LinearTest, AcceptsZeroRows) {
  Matrix none(0, kHidden);
  std::vector<float> w(kHidden * 2, 1.0F);
  std::vector<float> grad_w(kHidden * 2, 3.0F);
  Matrix y(0, 2);
  linear_forward(none, w.data(), rows_of(y));
  linear_backward_weight(y, none, grad_w.data());
  EXPECT_EQ(grad_w, std::vector<float>(kHidden * 2, 3.0F));
}

TEST(RmsNormTest, GivesRowsOfUnitMeanSquare) {
  OwnedParameter gain(kHidden, 1);
  std::ranges::fill(gain.value, 1.0F);
  RmsNorm norm(gain.get());
  Matrix y;
  norm.forward(random_matrix(kTokens, kHidden, 7), y);
  for (int t = 0; t < kTokens; ++t) {
    const std::span row(y.row(t), kHidden);
    EXPECT_NEAR(dot(row, row) / kHidden, 1.0, 1e-4);
  }
}

TEST(RmsNormTest, GradientsMatchDifferences) {
  Matrix x = random_matrix(kTokens, kHidden, 8);
  OwnedParameter gain(kHidden, 9);
  const Matrix probe = random_matrix(kTokens, kHidden, 10);
  RmsNorm norm(gain.get());
  Matrix y;
  const auto loss = [&] {
    norm.forward(x, y);
    return dot(y.span(), probe.span());
  };
  loss();
  Matrix grad_x(kTokens, kHidden);
  norm.backward(probe, grad_x, one_shard(kTokens));
  expect_gradient("x", x.span(), grad_x.span(), loss);
  expect_gradient("gain", gain.value, gain.grad, loss);
}

TEST(EmbeddingTest, SumsTheVectorsOfTheWindow) {
  const int window = 2;
  OwnedParameter table(static_cast<size_t>(window * kNumBytes * kHidden), 11);
  const Embedding embedding(table.get(), window, kHidden);
  const std::vector<std::byte> windows = {std::byte{3}, std::byte{255}};
  Matrix x;
  embedding.forward(windows, x);
  ASSERT_EQ(x.rows(), 1);
  for (size_t h = 0; h < kHidden; ++h) {
    const float expected =
        table.value[3 * kHidden + h] + table.value[(kNumBytes + 255) * kHidden + h];
    EXPECT_EQ(x.data()[h], expected);
  }
}

TEST(EmbeddingTest, GradientsMatchDifferences) {
  const int window = 3;
  OwnedParameter table(static_cast<size_t>(window * kNumBytes * kHidden), 12);
  Embedding embedding(table.get(), window, kHidden);
  const auto windows = some_bytes(kTokens * window);
  const Matrix probe = random_matrix(kTokens, kHidden, 13);
  const auto loss = [&] {
    Matrix x;
    embedding.forward(windows, x);
    return dot(x.span(), probe.span());
  };
  embedding.backward(windows, probe, one_shard(kTokens));
  expect_gradient("table", table.value, table.grad, loss, 300);
  // The first window's first byte, certainly present.
  expect_gradient(
      "vector", std::span(table.value).first(kHidden), std::span(table.grad).first(kHidden), loss
  );
}

TEST(LossTest, IsTheLogarithmOfTheNumberOfBytesWhenNothingIsKnown) {
  Matrix logits(2, kNumBytes);
  std::ranges::fill(logits.span(), 0.5F);
  EXPECT_NEAR(cross_entropy(rows_of(logits), some_bytes(2), 0.5F), 8 * std::numbers::ln2, 1e-5);
}

TEST(LossTest, StaysFiniteForHopelessLogits) {
  Matrix logits(1, kNumBytes);
  std::ranges::fill(logits.span(), 0.0F);
  logits.data()[7] = 1e4F;
  const std::vector<std::byte> target = {std::byte{1}};
  EXPECT_NEAR(cross_entropy(rows_of(logits), target, 1.0F), 1e4, 1);
}

TEST(LossTest, GradientsMatchDifferences) {
  Matrix logits = random_matrix(kTokens, kNumBytes, 14);
  const auto targets = some_bytes(kTokens);
  const auto loss = [&] {
    Matrix copy = logits;
    return cross_entropy(rows_of(copy), targets, 0.2F);
  };
  Matrix grad = logits;
  cross_entropy(rows_of(grad), targets, 0.2F);
  expect_gradient("logits", logits.span(), grad.span(), loss, 300);
}

TEST(HeadTest, GradientsMatchDifferences) {
  Matrix x = random_matrix(kTokens, kHidden, 15);
  OwnedParameter gain(kHidden, 16);
  OwnedParameter weight(kNumBytes * kHidden, 17);
  const Matrix probe = random_matrix(kTokens, kNumBytes, 18);
  Head head(gain.get(), weight.get());
  Matrix logits;
  const auto loss = [&] {
    head.forward(x, logits, one_shard(kTokens));
    return dot(logits.span(), probe.span());
  };
  loss();
  Matrix grad_x;
  head.backward(probe, grad_x, one_shard(kTokens));
  expect_gradient("x", x.span(), grad_x.span(), loss);
  expect_gradient("gain", gain.value, gain.grad, loss);
  expect_gradient("weight", weight.value, weight.grad, loss);
}

// Gradients of tokens [0, 2) and [2, 5), kept apart, against those of all tokens.
TEST(ShardsTest, EachGetsTheGradientsOfItsOwnTokens) {
  const Shards shards = {{0, 2}, {2, kTokens}};
  const Matrix x = random_matrix(kTokens, kHidden, 21);
  const Matrix grad_y = random_matrix(kTokens, 3, 22);
  OwnedParameter w(3 * kHidden, 23);
  std::vector<float> grads(2 * w.grad.size());
  const Parameter sharded = {w.value, {grads.data(), w.grad.size()}, w.grad.size()};
  Matrix grad_x(kTokens, kHidden);
  linear_backward(grad_y, x, sharded, rows_of(grad_x), shards);
  for (size_t i = 0; i < shards.size(); ++i) {
    std::vector<float> expected(w.grad.size());
    linear_backward_weight(slice(grad_y, shards[i]), slice(x, shards[i]), expected.data());
    EXPECT_TRUE(std::ranges::equal(sharded.grad_of(i), expected)) << "shard " << i;
  }
}

TEST(MatrixTest, TravelsAsBfloat16) {
  const Matrix m = random_matrix(3, 8, 19);
  std::vector<uint16_t> bits;
  const ConstTensor tensor = as_tensor(m, DType::kBFloat16, bits);
  EXPECT_EQ(tensor.num_bytes(), 3 * 8 * 2);
  Matrix scratch;
  const ConstRows back = as_rows(tensor, scratch);
  for (int i = 0; i < 24; ++i) {
    EXPECT_NEAR(back.data[i], m.data()[i], std::abs(m.data()[i]) / 256);
  }
}

TEST(MatrixTest, TravelsAsFloat32WithoutACopy) {
  const Matrix m = random_matrix(3, 8, 20);
  std::vector<uint16_t> bits;
  Matrix scratch;
  EXPECT_EQ(as_rows(as_tensor(m, DType::kFloat32, bits), scratch).data, m.data());
}

}  // namespace
}  // namespace weft::moe
