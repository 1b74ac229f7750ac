// SPDX-License-Identifier: Apache-2.0
#include "plan/random_routing.hpp"

#include <algorithm>
#include <set>

#include "unit/plan/plan_cases.hpp"

namespace weft {
namespace {

RandomRouting spec_of(Popularity popularity) {
  RandomRouting spec;
  spec.num_tokens = 2000;
  spec.num_experts = 32;
  spec.topk = 4;
  spec.popularity = popularity;
  spec.seed = 7;
  return spec;
}

std::vector<int64_t> counts_of(const RouteTable& table, int num_experts) {
  std::vector<int64_t> counts(static_cast<size_t>(num_experts));
  for (const int32_t expert : table.expert) {
    if (expert >= 0) {
      ++counts[static_cast<size_t>(expert)];
    }
  }
  return counts;
}

// Known values: the same on every platform and in every version.
TEST(RandomRoutingTest, IsTheSameEverywhere) {
  RandomRouting spec = spec_of(Popularity::kZipf);
  spec.num_tokens = 3;
  EXPECT_EQ(
      random_routing(spec).expert,
      (std::vector<int32_t>{17, 10, 5, 4, 10, 30, 17, 5, 23, 17, 5, 21})
  );
  RandomSource random(1);
  EXPECT_EQ(random.next(), 0x910a2dec89025cc1U);  // the published sequence of splitmix64
}

TEST(RandomRoutingTest, DiffersByRankAndSeed) {
  RandomRouting spec = spec_of(Popularity::kUniform);
  const RouteTable first = random_routing(spec, 0);
  EXPECT_EQ(first.expert, random_routing(spec, 0).expert);
  EXPECT_NE(first.expert, random_routing(spec, 1).expert);
  spec.seed = 8;
  EXPECT_NE(first.expert, random_routing(spec, 0).expert);
}

TEST(RandomRoutingTest, DrawsUniformlyWithoutRepeats) {
  const RouteTable table = random_routing(spec_of(Popularity::kUniform));
  for (const int64_t count : counts_of(table, 32)) {
    EXPECT_NEAR(static_cast<double>(count), 250, 80);  // 5 standard deviations
  }
  for (size_t i = 0; i < table.expert.size(); i += 4) {
    const std::set<int32_t> distinct(
        table.expert.begin() + static_cast<int64_t>(i),
        table.expert.begin() + static_cast<int64_t>(i) + 4
    );
    ASSERT_EQ(distinct.size(), 4U);
  }
}

TEST(RandomRoutingTest, SkewsMoreWithALargerExponent) {
  RandomRouting spec = spec_of(Popularity::kZipf);
  spec.repeat_experts = true;
  int64_t previous = 0;
  for (const double exponent : {0.0, 0.5, 1.0, 2.0}) {
    spec.zipf_exponent = exponent;
    const int64_t most = std::ranges::max(counts_of(random_routing(spec), 32));
    EXPECT_GT(most, previous);
    previous = most;
  }
  EXPECT_NEAR(static_cast<double>(previous), 8000 / 1.614, 300);  // sum of 1 / n^2 to n = 32
}

TEST(RandomRoutingTest, SharesPopularExpertsAmongRanks) {
  RandomRouting spec = spec_of(Popularity::kZipf);
  spec.zipf_exponent = 2.0;
  const auto most_popular = [&](int rank) {
    const std::vector<int64_t> counts = counts_of(random_routing(spec, rank), 32);
    return std::ranges::max_element(counts) - counts.begin();
  };
  EXPECT_EQ(most_popular(0), most_popular(1));
}

TEST(RandomRoutingTest, SendsAllToOne) {
  const std::vector<int64_t> counts =
      counts_of(random_routing(spec_of(Popularity::kOneExpert)), 32);
  EXPECT_EQ(std::ranges::max(counts), 8000);
}

TEST(RandomRoutingTest, LeavesHoles) {
  RandomRouting spec = spec_of(Popularity::kUniform);
  spec.hole_fraction = 0.25;
  EXPECT_NEAR(static_cast<double>(std::ranges::count(random_routing(spec).expert, -1)), 2000, 200);
  spec.hole_fraction = 1.0;
  EXPECT_EQ(std::ranges::count(random_routing(spec).expert, -1), 8000);
}

TEST(RandomRoutingTest, FillsEveryExpertWhenTopkIsAll) {
  RandomRouting spec = spec_of(Popularity::kZipf);
  spec.zipf_exponent = 8.0;
  spec.topk = 32;
  const std::vector<int64_t> counts = counts_of(random_routing(spec), 32);
  EXPECT_TRUE(std::ranges::all_of(counts, [](int64_t count) { return count == 2000; }));
}

TEST(RandomRoutingTest, MakesPositiveWeightsOnRequest) {
  RandomRouting spec = spec_of(Popularity::kUniform);
  for (const float weight : random_routing(spec).weight) {
    ASSERT_GT(weight, 0.0F);
    ASSERT_LE(weight, 1.0F);
  }
  spec.with_weights = false;
  EXPECT_TRUE(random_routing(spec).weight.empty());
}

TEST(RandomRoutingTest, RefusesImpossibleSizes) {
  RandomRouting spec = spec_of(Popularity::kUniform);
  spec.num_experts = 3;
  EXPECT_EQ(
      testing::message_of([&] { static_cast<void>(random_routing(spec)); }),
      "random_routing: 2000 tokens, 3 experts, topk = 4 (topk is 1 to 32 and at most the experts)"
  );
  spec.repeat_experts = true;
  EXPECT_EQ(testing::message_of([&] { static_cast<void>(random_routing(spec)); }), "nothing");
}

}  // namespace
}  // namespace weft
