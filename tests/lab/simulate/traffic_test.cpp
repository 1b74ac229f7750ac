// SPDX-License-Identifier: Apache-2.0
#include "simulate/traffic.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "cpu/protocol/region_map.hpp"
#include "simulate_cases.hpp"
#include "support/errors.hpp"

namespace weft::sim {
namespace {

using Field = int64_t RankTraffic::*;

int64_t sum_of(const Traffic& traffic, Field field) {
  int64_t sum = 0;
  for (const RankTraffic& rank : traffic.ranks) {
    sum += rank.*field;
  }
  return sum;
}

// Every row on its own, the slow way.
struct Walk {
  std::vector<RankTraffic> ranks;
  std::vector<std::vector<int64_t>> direct;  // [from][to] rows over links or, flat, cards
  std::vector<std::vector<int64_t>> arrivals;
};

Walk walk(const Scenario& scenario, const std::vector<RouteTable>& routes) {
  const auto ranks = static_cast<size_t>(scenario.num_ranks);
  Walk walk{std::vector<RankTraffic>(ranks), {}, {ranks, std::vector<int64_t>(ranks)}};
  for (int source = 0; source < scenario.num_ranks; ++source) {
    const RouteTable& table = routes[static_cast<size_t>(source)];
    for (int64_t token = 0; token < table.num_tokens; ++token) {
      std::set<int> to_ranks;
      std::set<int> to_domains;
      for (int k = 0; k < table.topk; ++k) {
        const int expert = table.expert[static_cast<size_t>(token * table.topk + k)];
        if (expert >= 0) {
          to_ranks.insert(scenario.owner_of(expert));
          to_domains.insert(scenario.domain_of(scenario.owner_of(expert)));
        }
      }
      const int own_domain = scenario.domain_of(source);
      for (const int domain : to_domains) {
        if (domain != own_domain && !scenario.is_flat) {
          ++walk.ranks[static_cast<size_t>(source)].card_out;
          ++walk.ranks[static_cast<size_t>(scenario.forwarder(source, domain))].card_in;
        }
      }
      for (const int to : to_ranks) {
        ++walk.arrivals[static_cast<size_t>(source)][static_cast<size_t>(to)];
        const bool is_remote = scenario.domain_of(to) != own_domain;
        if (is_remote && scenario.is_flat) {
          ++walk.ranks[static_cast<size_t>(source)].card_out;
          ++walk.ranks[static_cast<size_t>(to)].card_in;
          continue;
        }
        const int from = is_remote ? scenario.forwarder(source, scenario.domain_of(to)) : source;
        if (from != to) {
          ++walk.ranks[static_cast<size_t>(from)].link_out;
          ++walk.ranks[static_cast<size_t>(to)].link_in;
        }
      }
    }
  }
  return walk;
}

class TrafficTest : public testing::TestWithParam<bool> {};

TEST_P(TrafficTest, CountsWhatAWalkOverAllRowsCounts) {
  for (const double skew : {0.0, 1.5}) {
    Scenario scenario = small_scenario();
    scenario.is_flat = GetParam();
    const auto routes = make_routes(
        scenario,
        {.skew = skew, .hole_fraction = 0.2, .repeat_experts = true, .has_uneven_tokens = true}
    );
    const Traffic traffic = count_traffic(scenario, 8, routes);
    const Walk expected = walk(scenario, routes);
    for (int rank = 0; rank < scenario.num_ranks; ++rank) {
      SCOPED_TRACE("rank " + std::to_string(rank));
      const auto r = static_cast<size_t>(rank);
      EXPECT_EQ(traffic.ranks[r].link_out, expected.ranks[r].link_out);
      EXPECT_EQ(traffic.ranks[r].link_in, expected.ranks[r].link_in);
      EXPECT_EQ(traffic.ranks[r].card_out, expected.ranks[r].card_out);
      EXPECT_EQ(traffic.ranks[r].card_in, expected.ranks[r].card_in);
      for (int to = 0; to < scenario.num_ranks; ++to) {
        EXPECT_EQ(traffic.arrivals(rank, to), expected.arrivals[r][static_cast<size_t>(to)]);
      }
    }
  }
}

// Rows that are sent are received, on each kind of link; signals are raised once for each row.
TEST_P(TrafficTest, LosesAndInventsNothing) {
  Scenario scenario = small_scenario();
  scenario.is_flat = GetParam();
  const auto routes = make_routes(scenario, {.skew = 1, .hole_fraction = 0.1});
  const Traffic traffic = count_traffic(scenario, 8, routes);
  EXPECT_GT(sum_of(traffic, &RankTraffic::card_out), 0);
  EXPECT_EQ(sum_of(traffic, &RankTraffic::link_out), sum_of(traffic, &RankTraffic::link_in));
  EXPECT_EQ(sum_of(traffic, &RankTraffic::card_out), sum_of(traffic, &RankTraffic::card_in));
  EXPECT_EQ(
      sum_of(traffic, &RankTraffic::dispatch_raises), sum_of(traffic, &RankTraffic::combine_raises)
  );
  EXPECT_EQ(
      sum_of(traffic, &RankTraffic::dispatch_signals),
      sum_of(traffic, &RankTraffic::combine_signals)
  );
  const RankTraffic& some = traffic.ranks[5];
  EXPECT_LE(some.card_out, some.card_out_per_rank);
  EXPECT_LE(some.card_out_per_rank, some.card_out_per_route);
  EXPECT_EQ(scenario.is_flat, some.card_out == some.card_out_per_rank);
  EXPECT_EQ(scenario.is_flat, sum_of(traffic, &RankTraffic::forwarded) == 0);
}

INSTANTIATE_TEST_SUITE_P(
    All,
    TrafficTest,
    testing::Bool(),
    [](const testing::TestParamInfo<bool>& param) { return param.param ? "flat" : "by_domain"; }
);

// 1 - C(E - E/G, K) / C(E, K) of the domains have one of K different experts.
TEST(TrafficLawTest, UniformTokensReachTheExpectedNumberOfDomains) {
  Scenario scenario = small_scenario();
  scenario.max_tokens = 4000;
  const Traffic traffic = count_traffic(scenario, 8, make_routes(scenario));
  double missed = 1;
  for (int k = 0; k < scenario.topk; ++k) {
    const double elsewhere = scenario.num_experts - scenario.num_experts / scenario.num_domains();
    missed *= (elsewhere - k) / (scenario.num_experts - k);
  }
  const double expected = scenario.num_domains() * (1 - missed);
  // 96,000 tokens: the standard error is about 0.002.
  EXPECT_NEAR(traffic.domains_per_token, expected, 0.01);
}

TEST(TrafficLawTest, MessagesEndWithTheirChunk) {
  EXPECT_EQ(count_messages(0, 8), 0);
  EXPECT_EQ(count_messages(1, 8), 1);
  EXPECT_EQ(count_messages(kChunkArrivals, 8), 4);
  EXPECT_EQ(count_messages(kChunkArrivals + 1, 8), 5);
  EXPECT_EQ(count_messages(2 * kChunkArrivals, 1), 64);
  EXPECT_EQ(count_messages(2 * kChunkArrivals, 20), 4);
}

TEST(TrafficErrorTest, NamesWhatDoesNotFit) {
  const Scenario good = small_scenario();
  const auto routes = make_routes(good);
  Scenario scenario = good;
  const auto refusal = [&] {
    return test::text_of(test::thrown_by([&] {
      static_cast<void>(count_traffic(scenario, 8, routes));
    }));
  };
  EXPECT_EQ(refusal(), "nothing");
  scenario.ranks_per_domain = 5;
  EXPECT_EQ(refusal(), "simulate: num_ranks = 24 is not a multiple of ranks_per_domain = 5");
  scenario = good;
  scenario.num_experts = 40;
  EXPECT_EQ(refusal(), "simulate: num_experts = 40 is not a positive multiple of num_ranks = 24");
  scenario = good;
  scenario.num_ranks = 4;
  EXPECT_EQ(refusal(), "simulate: routing of 24 ranks (num_ranks = 4)");
}

}  // namespace
}  // namespace weft::sim
