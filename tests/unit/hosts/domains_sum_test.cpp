// SPDX-License-Identifier: Apache-2.0
// The oracle's order of sums in several domains, on numbers small enough to add by hand.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/half.hpp"
#include "exchange/reference/reference_exchange.hpp"
#include "plan/reference/reference_plan.hpp"

namespace weft {
namespace {

// One token of rank 0 with one row on each of four ranks, which holds `values[rank]`, in bf16.
float sum_of(const std::vector<float>& values, const std::vector<int>& domain_of) {
  RouteTable none;
  none.topk = 4;
  RouteTable one = none;
  one.num_tokens = 1;
  one.expert = {0, 1, 2, 3};
  std::vector<Plan> plans;
  for (PlanData& data : reference_plans(std::vector{one, none, none, none}, 4, {})) {
    plans.emplace_back(std::make_shared<const PlanData>(std::move(data)));
  }
  std::vector<uint16_t> rows;
  for (const float value : values) {
    rows.push_back(float_to_bf16(value));
  }
  uint16_t x = 0;
  std::vector<CombineInput> in(4);
  std::vector<CombineOutput> out(4);
  for (size_t rank = 0; rank < 4; ++rank) {
    in[rank].rows = {reinterpret_cast<const std::byte*>(&rows[rank]), DType::kBFloat16, 1, 1};
    out[rank].x = {nullptr, DType::kBFloat16, 0, 1};
  }
  out[0].x = {reinterpret_cast<std::byte*>(&x), DType::kBFloat16, 1, 1};
  reference_combine(plans, in, out, domain_of);
  return bf16_to_float(x);
}

constexpr float kTie = 0x1p-8F;  // beside 1: half of bf16's last place, goes to the even 1

TEST(DomainSumTest, RoundsOncePerDomain) {
  // 1 + 2^-8 + 2^-8 + 2^-8 is 1 + 3 * 2^-8, a tie between 1 + 2^-7 and 1 + 2^-6: the even one.
  const std::vector<float> values = {1, kTie, kTie, kTie};
  EXPECT_EQ(sum_of(values, {}), 1 + 0x1p-6F);
  EXPECT_EQ(sum_of(values, {0, 0, 0, 0}), 1 + 0x1p-6F);
  // 1 + 2^-8 is rounded to 1; 2^-8 + 2^-8 is 2^-7, which counts.
  EXPECT_EQ(sum_of(values, {0, 0, 1, 1}), 1 + 0x1p-7F);
  // Each alone is a domain that rounds to itself.
  EXPECT_EQ(sum_of(values, {0, 1, 2, 3}), 1 + 0x1p-6F);
}

TEST(DomainSumTest, AddsDomainsThatInterleave) {
  // 1 + 2^-8 (ranks 0 and 2) is rounded to 1, then 2^-8 + 0 is added: a tie, to 1.
  EXPECT_EQ(sum_of({1, kTie, kTie, 0}, {0, 1, 0, 1}), 1.0F);
  // Ranks 1 and 2 together are 2^-7.
  EXPECT_EQ(sum_of({1, kTie, kTie, 0}, {0, 1, 1, 0}), 1 + 0x1p-7F);
}

// The token's own domain is rounded like each other.
TEST(DomainSumTest, DoesNotFavourTheTokensOwnDomain) {
  EXPECT_EQ(sum_of({1, kTie, kTie, 0}, {0, 0, 1, 1}), sum_of({kTie, 0, 1, kTie}, {0, 0, 1, 1}));
}

}  // namespace
}  // namespace weft
