// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/errors.hpp"
#include "weft/routing.hpp"

namespace weft::test {
namespace {

constexpr int kExperts = 8;
constexpr int kRanks = 4;
constexpr int64_t kTokens = 3;

class CountRoutingTest : public ::testing::Test {
 protected:
  [[nodiscard]] RoutingCounts counts() {
    return {
        .per_rank = matrix(per_rank_.data(), 1, kRanks),
        .per_expert = matrix(per_expert_.data(), 1, kExperts),
        .is_token_in_rank = matrix(is_in_rank_.data(), kTokens, kRanks),
        .per_host = matrix(per_host_.data(), 1, 2),
        .host_of_rank = std::as_const(hosts_)};
  }
  [[nodiscard]] static ConstTensor idx(const std::vector<int64_t>& topk_idx) {
    return matrix(topk_idx.data(), kTokens, static_cast<int64_t>(topk_idx.size()) / kTokens);
  }

  std::array<int32_t, kRanks> per_rank_{-7, -7, -7, -7};
  std::array<int32_t, kExperts> per_expert_{-7, -7, -7, -7, -7, -7, -7, -7};
  std::array<bool, kTokens * kRanks> is_in_rank_{true, true, true};
  std::array<int32_t, 2> per_host_{-7, -7};
  std::array<int64_t, kRanks> host_of_rank_{0, 0, 1, 1};
  ConstTensor hosts_ = matrix(std::as_const(host_of_rank_).data(), 1, kRanks);
  // Two of one rank, two of one host, and what is no choice.
  std::vector<int64_t> topk_idx_{
      0, 1, 3, -1, 8, 7, 7, 5, -5, std::numeric_limits<int64_t>::max(), -1, -1};
};

TEST_F(CountRoutingTest, CountsATokenOnceForARankAndAHost) {
  count_routing(idx(topk_idx_), kExperts, counts());
  EXPECT_EQ(per_expert_, (std::array<int32_t, kExperts>{1, 1, 0, 1, 0, 1, 0, 2}));
  EXPECT_EQ(per_rank_, (std::array<int32_t, kRanks>{1, 1, 1, 1}));
  EXPECT_EQ(per_host_, (std::array<int32_t, 2>{1, 1}));
  const std::array<bool, kTokens * kRanks> wanted{
      true, true, false, false, false, false, true, true, false, false, false, false};
  EXPECT_EQ(is_in_rank_, wanted);
}

TEST_F(CountRoutingTest, TakesIndicesOf32BitsAndNoHosts) {
  const std::vector<int32_t> narrow{0, 1, 3, -1, 8, 7, 7, 5, -5, 9, -1, -1};
  RoutingCounts out = counts();
  out.per_host = {};
  out.host_of_rank = {};
  count_routing(matrix(narrow.data(), kTokens, 4), kExperts, out);
  EXPECT_EQ(per_expert_, (std::array<int32_t, kExperts>{1, 1, 0, 1, 0, 1, 0, 2}));
  EXPECT_EQ(per_host_, (std::array<int32_t, 2>{-7, -7}));
}

TEST_F(CountRoutingTest, RefusesWhatDoesNotFit) {
  const auto text = [&](int num_experts, const RoutingCounts& out) {
    return thrown_by([&] { count_routing(idx(topk_idx_), num_experts, out); })->text;
  };
  EXPECT_EQ(
      text(6, counts()), "count_routing: num_experts = 6 (expected a multiple of the 4 ranks)"
  );
  RoutingCounts out = counts();
  out.is_token_in_rank.rows = 2;
  EXPECT_EQ(
      text(kExperts, out), "count_routing: is_token_in_rank has shape [2, 4] (expected [3, 4])"
  );
  host_of_rank_[3] = 2;
  EXPECT_EQ(text(kExperts, counts()), "count_routing: host_of_rank[3] = 2 (expected 0 to 1)");
}

}  // namespace
}  // namespace weft::test
