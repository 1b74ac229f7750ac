// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "support/errors.hpp"
#include "weft/routing.hpp"

namespace weft::test {
namespace {

constexpr int64_t kExperts = 5;
constexpr int64_t kTokens = 3;
constexpr int64_t kTopk = 4;

class SpreadRoutingTest : public ::testing::Test {
 protected:
  SpreadRoutingTest() {
    map_.fill(true);
    spread_.fill(-7);
  }
  [[nodiscard]] SpreadRouting out() {
    return {
        .map = matrix(map_.data(), kTokens, kExperts),
        .weights = matrix(spread_.data(), kTokens, kExperts)};
  }
  [[nodiscard]] ConstTensor weights() const { return matrix(weights_.data(), kTokens, kTopk); }

  std::array<bool, kTokens * kExperts> map_{};
  std::array<float, kTokens * kExperts> spread_{};
  // An expert twice, and what is none.
  std::vector<int64_t> topk_idx_{4, 0, 4, -1, -1, -1, -9, 5, 1, int64_t{1} << 32, 2, 3};
  std::vector<float> weights_{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  std::array<bool, kTokens * kExperts> wanted_map_{
      true,
      false,
      false,
      false,
      true,
      false,
      false,
      false,
      false,
      false,
      false,
      true,
      true,
      true,
      false};
};

TEST_F(SpreadRoutingTest, PutsChoicesIntoTheColumnsOfTheirExperts) {
  spread_routing(matrix(std::as_const(topk_idx_).data(), kTokens, kTopk), weights(), out());
  EXPECT_EQ(map_, wanted_map_);
  const std::array<float, kTokens * kExperts> wanted{2, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 9, 11, 12, 0};
  EXPECT_EQ(spread_, wanted) << "the weights of an expert add up";
}

TEST_F(SpreadRoutingTest, TakesIndicesOf32BitsAndNoWeights) {
  std::vector<int32_t> narrow(topk_idx_.begin(), topk_idx_.end());
  narrow[9] = 7;
  spread_routing(matrix(std::as_const(narrow).data(), kTokens, kTopk), {}, {.map = out().map});
  EXPECT_EQ(map_, wanted_map_);
  EXPECT_TRUE(std::ranges::all_of(spread_, [](float weight) { return weight == -7; }));
}

TEST_F(SpreadRoutingTest, TakesTokensWithoutAnyChoice) {
  spread_routing(matrix(std::as_const(topk_idx_).data(), kTokens, 0), {}, {.map = out().map});
  EXPECT_TRUE(std::ranges::none_of(map_, [](bool is_set) { return is_set; }));
}

TEST_F(SpreadRoutingTest, RefusesWhatDoesNotFit) {
  const ConstTensor idx = matrix(std::as_const(topk_idx_).data(), kTokens, kTopk);
  SpreadRouting small = out();
  small.map.rows = 2;
  EXPECT_EQ(
      thrown_by([&] { spread_routing(idx, weights(), small); })->text,
      "spread_routing: map has shape [2, 5] (expected [3, 5])"
  );
  EXPECT_EQ(
      thrown_by([&] { spread_routing(idx, {}, out()); })->text, "spread_routing: weights is missing"
  );
}

}  // namespace
}  // namespace weft::test
