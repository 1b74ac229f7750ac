// SPDX-License-Identifier: Apache-2.0
// Compares a gradient with central differences of the function itself.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "train/layers/math.hpp"

namespace weft::moe {

// Checks up to `most` elements of `grad` against loss() as a function of the same elements of
// `value`.
inline void expect_gradient(
    std::string_view name,
    std::span<float> value,
    std::span<const float> grad,
    const std::function<double()>& loss,
    size_t most = 40
) {
  ASSERT_EQ(value.size(), grad.size());
  const float step = 4e-3F;
  double largest = 0;
  for (const float g : grad) {
    largest = std::max(largest, std::abs(static_cast<double>(g)));
  }
  EXPECT_GT(largest, 0) << name << " has no gradient at all";
  const size_t stride = std::max<size_t>(1, value.size() / most);
  for (size_t i = 0; i < value.size(); i += stride) {
    const float kept = value[i];
    value[i] = kept + step;
    const double above = loss();
    value[i] = kept - step;
    const double below = loss();
    value[i] = kept;
    const double expected = (above - below) / (2.0 * static_cast<double>(step));
    EXPECT_NEAR(static_cast<double>(grad[i]), expected, 0.01 * largest + 2e-4)
        << name << "[" << i << "]";
  }
}

inline std::vector<float> random_values(size_t size, uint32_t seed, float scale = 1.0F) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> draw(-scale, scale);
  std::vector<float> values(size);
  std::ranges::generate(values, [&] { return draw(random); });
  return values;
}

// A parameter with its memory.
struct OwnedParameter {
  std::vector<float> value;
  std::vector<float> grad;
  OwnedParameter(size_t size, uint32_t seed, float scale = 0.5F)
      : value(random_values(size, seed, scale)), grad(size) {}
  [[nodiscard]] Weight get() { return {value.data(), grad.data()}; }
};

// A scalar function of a layer's output whose gradient is `probe`.
inline double dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  return sum;
}

}  // namespace weft::moe
