// SPDX-License-Identifier: Apache-2.0
#include "train/layers/experts.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "gradient_check.hpp"

namespace weft::moe {
namespace {

constexpr int kHidden = 8;
constexpr int kInner = 6;
constexpr int kExperts = 3;
const std::vector<int64_t> kRowsPerExpert = {4, 0, 3};
constexpr int kRows = 7;

struct ExpertsFixture : testing::Test {
  OwnedParameter in{static_cast<size_t>(kExperts * 2 * kInner * kHidden), 1};
  OwnedParameter out{static_cast<size_t>(kExperts * kHidden * kInner), 2};
  std::vector<float> x = random_values(kRows * kHidden, 3);
  std::vector<float> weight = random_values(kRows, 4);
  Math math;
  Experts experts{
      math, {in.value.data(), out.value.data(), in.grad.data(), out.grad.data()}, kHidden, kInner};
  std::vector<float> y = std::vector<float>(x.size());
  std::vector<float> grad_x = std::vector<float>(x.size());
  std::vector<float> grad_weight = std::vector<float>(kRows);

  [[nodiscard]] Experts::Rows rows() const { return {x.data(), weight.data(), kRowsPerExpert}; }
};

using ExpertsTest = ExpertsFixture;

TEST_F(ExpertsTest, ComputesGatedProductsOfEachRowsExpert) {
  experts.forward(rows(), y.data());
  for (size_t i = 0; i < kRows; ++i) {
    const size_t e = i < 4 ? 0 : 2;
    std::vector<double> active(kInner);
    const auto row = std::span(x).subspan(i * kHidden, kHidden);
    for (size_t f = 0; f < kInner; ++f) {
      const auto w_in = std::span(in.value).subspan(e * 2 * kInner * kHidden);
      const double gate = dot(w_in.subspan(f * kHidden, kHidden), row);
      const double up = dot(w_in.subspan((kInner + f) * kHidden, kHidden), row);
      active[f] = gate / (1.0 + std::exp(-gate)) * up * static_cast<double>(weight[i]);
    }
    for (size_t h = 0; h < kHidden; ++h) {
      double expected = 0;
      for (size_t f = 0; f < kInner; ++f) {
        expected += active[f] * static_cast<double>(out.value[(e * kHidden + h) * kInner + f]);
      }
      EXPECT_NEAR(static_cast<double>(y[i * kHidden + h]), expected, 1e-5);
    }
  }
}

TEST_F(ExpertsTest, GradientsMatchDifferences) {
  const auto probe = random_values(kRows * kHidden, 5);
  const auto loss = [&] {
    experts.forward(rows(), y.data());
    return dot(y, probe);
  };
  loss();
  experts.backward(rows(), probe.data(), grad_x.data(), grad_weight.data());
  experts.add_weight_gradients(rows(), probe.data());
  expect_gradient("x", x, grad_x, loss);
  expect_gradient("weight", weight, grad_weight, loss);
  expect_gradient("in", in.value, in.grad, loss, 60);
  expect_gradient("out", out.value, out.grad, loss, 60);
}

TEST_F(ExpertsTest, LeavesWeightGradientsForLater) {
  const auto is_zero = [](float g) { return g == 0.0F; };
  const auto probe = random_values(kRows * kHidden, 6);
  experts.forward(rows(), y.data());
  experts.backward(rows(), probe.data(), grad_x.data(), grad_weight.data());
  EXPECT_TRUE(std::ranges::all_of(in.grad, is_zero));
  EXPECT_TRUE(std::ranges::all_of(out.grad, is_zero));
  experts.add_weight_gradients(rows(), probe.data());
  EXPECT_FALSE(std::ranges::all_of(in.grad, is_zero));
  EXPECT_FALSE(std::ranges::all_of(out.grad, is_zero));
}

TEST_F(ExpertsTest, AnIdleExpertGetsNoGradient) {
  const auto probe = random_values(kRows * kHidden, 6);
  experts.forward(rows(), y.data());
  experts.backward(rows(), probe.data(), grad_x.data(), grad_weight.data());
  experts.add_weight_gradients(rows(), probe.data());
  const auto idle = std::span(in.grad).subspan(2 * kInner * kHidden, 2 * kInner * kHidden);
  EXPECT_TRUE(std::ranges::all_of(idle, [](float g) { return g == 0.0F; }));
}

}  // namespace
}  // namespace weft::moe
