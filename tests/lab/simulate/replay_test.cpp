// SPDX-License-Identifier: Apache-2.0
#include "simulate/replay.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "cpu/protocol/region_map.hpp"
#include "simulate_cases.hpp"

namespace weft::sim {
namespace {

struct Replayed {
  Traffic traffic;
  Schedule schedule;
  ReplayTimes dispatch;
  ReplayTimes combine;
};

Replayed replay_of(
    const Scenario& scenario, const Model& model, const std::vector<RouteTable>& routes
) {
  Replayed done;
  done.traffic = count_traffic(scenario, static_cast<int64_t>(model.message_rows), routes);
  const std::vector<bool> all(static_cast<size_t>(scenario.num_domains()), true);
  done.schedule = make_schedule(scenario, done.traffic, routes, all);
  done.dispatch = replay_dispatch(scenario, model, done.schedule);
  done.combine = replay_combine(scenario, model, done.schedule, done.traffic);
  return done;
}

// One token of rank 0 that goes to the experts given; everyone else has none.
std::vector<RouteTable> one_token(const Scenario& scenario, const std::vector<int32_t>& experts) {
  std::vector<RouteTable> routes(static_cast<size_t>(scenario.num_ranks));
  for (RouteTable& table : routes) {
    table.topk = scenario.topk;
  }
  routes[0].num_tokens = 1;
  routes[0].expert = experts;
  return routes;
}

// 4 ranks in 2 domains, an expert each, top-2, rows of 100,000 B.
Scenario tiny_scenario() {
  return {
      .num_ranks = 4,
      .ranks_per_domain = 2,
      .num_experts = 4,
      .topk = 2,
      .max_tokens = 1,
      .row_bytes = 100'000};
}

constexpr double kLinkUs = 1;    // of such a row at 100 GB/s
constexpr double kCopyUs = 0.1;  // at 1000 GB/s
constexpr double kCardUs = 10;   // at 10 GB/s
constexpr double kPostUs = 0.2;
constexpr double kLinkLatencyUs = 1;
constexpr double kSignalUs = 0.1;
constexpr double kCardLatencyUs = 2;

TEST(ReplayTest, ARowInsideTheDomainTakesItsLinkAndItsLatency) {
  const Scenario scenario = tiny_scenario();
  const Replayed done = replay_of(scenario, plain_model(), one_token(scenario, {1, -1}));
  EXPECT_DOUBLE_EQ(done.dispatch.us, kLinkUs + kSignalUs + kLinkLatencyUs);
  EXPECT_DOUBLE_EQ(done.combine.us, kCopyUs + kLinkUs + kSignalUs + kLinkLatencyUs + kCopyUs);
  EXPECT_EQ(done.dispatch.bound(), "links");
}

TEST(ReplayTest, ARowToAnotherDomainIsPostedSentAndForwarded) {
  const Scenario scenario = tiny_scenario();
  // Rank 2 carries for rank 0, so the row goes on to rank 3.
  const Replayed done = replay_of(scenario, plain_model(), one_token(scenario, {3, -1}));
  const double over_card = kPostUs + kCardUs + kCardLatencyUs;
  const double over_link = kLinkUs + kSignalUs + kLinkLatencyUs;
  EXPECT_DOUBLE_EQ(done.dispatch.us, over_card + over_link);
  EXPECT_DOUBLE_EQ(done.combine.us, kCopyUs + over_link + kCopyUs + over_card + kCopyUs);
  EXPECT_EQ(done.dispatch.bound(), "cards");
  EXPECT_DOUBLE_EQ(done.dispatch.busy.card_us, kCardUs);
  EXPECT_DOUBLE_EQ(done.dispatch.busy.link_us, kLinkUs + kSignalUs);
  EXPECT_DOUBLE_EQ(done.dispatch.busy.proxy_us, kPostUs);
}

TEST(ReplayTest, TwoRanksOfADomainShareOneCrossing) {
  Scenario scenario = tiny_scenario();
  const auto routes = one_token(scenario, {2, 3});
  const Replayed shared = replay_of(scenario, plain_model(), routes);
  EXPECT_DOUBLE_EQ(shared.dispatch.busy.card_us, kCardUs);
  scenario.is_flat = true;
  const Replayed flat = replay_of(scenario, plain_model(), routes);
  EXPECT_DOUBLE_EQ(flat.dispatch.busy.card_us, 2 * kCardUs);
  EXPECT_DOUBLE_EQ(flat.dispatch.busy.link_us, 0);
}

TEST(ReplayTest, AWindowOfOneMessageWaitsForEachConfirmation) {
  Scenario scenario = tiny_scenario();
  scenario.is_flat = true;
  Model model = plain_model();
  model.card_window = 1;
  const Replayed done = replay_of(scenario, model, one_token(scenario, {2, 3}));
  const double confirmed = kPostUs + kCardUs + 2 * kCardLatencyUs;
  EXPECT_DOUBLE_EQ(done.dispatch.us, confirmed + kPostUs + kCardUs + kCardLatencyUs);
}

TEST(ReplayTest, OneMoverDoesLinksAndCopiesInTurn) {
  const Scenario scenario = tiny_scenario();
  Model model = plain_model();
  model.copy_gbps = 100;  // a copy takes as long as a link
  model.link_signal_us = 0;
  const auto routes = one_token(scenario, {0, 1});
  EXPECT_DOUBLE_EQ(replay_of(scenario, model, routes).dispatch.us, kLinkUs + kLinkLatencyUs);
  model.link_latency_us = 0;
  model.one_mover = 1;
  EXPECT_DOUBLE_EQ(replay_of(scenario, model, routes).dispatch.us, 2 * kLinkUs);
}

using Law = std::tuple<bool, double>;  // flat, skew

class ReplayLawTest : public testing::TestWithParam<Law> {
 protected:
  ReplayLawTest() {
    scenario_.is_flat = std::get<0>(GetParam());
    routes_ = make_routes(scenario_, {.skew = std::get<1>(GetParam()), .hole_fraction = 0.1});
  }
  Scenario scenario_ = small_scenario();
  std::vector<RouteTable> routes_;
};

TEST_P(ReplayLawTest, IsNeverFasterThanItsBytes) {
  const Model model = plain_model();
  const Replayed done = replay_of(scenario_, model, routes_);
  for (const ReplayTimes& times : {done.dispatch, done.combine}) {
    double least = 0;
    for (const RankTraffic& rank : done.traffic.ranks) {
      const auto us = [&](int64_t rows, double gbps) {
        return static_cast<double>(rows * scenario_.row_bytes) / gbps / 1e3;
      };
      const double card = us(std::max(rank.card_in, rank.card_out), model.card_gbps);
      const double link = us(std::max(rank.link_in, rank.link_out), model.link_gbps);
      least = std::max({least, card + model.card_latency_us, link + model.link_latency_us});
    }
    EXPECT_GE(times.us, least);
    for (const double busy :
         {times.busy.link_us, times.busy.card_us, times.busy.proxy_us, times.busy.copy_us}) {
      EXPECT_GT(busy, 0);
      EXPECT_GE(times.us, busy);
    }
  }
}

TEST_P(ReplayLawTest, GivesTheSameTimesEachTime) {
  const Replayed once = replay_of(scenario_, plain_model(), routes_);
  const Replayed again = replay_of(scenario_, plain_model(), routes_);
  EXPECT_EQ(once.dispatch.us, again.dispatch.us);
  EXPECT_EQ(once.combine.us, again.combine.us);
}

TEST_P(ReplayLawTest, FasterPartsDoNotMakeItSlower) {
  const Replayed base = replay_of(scenario_, plain_model(), routes_);
  Model faster = plain_model();
  faster.card_gbps *= 10;
  faster.link_gbps *= 10;
  faster.copy_gbps *= 10;
  faster.post_us /= 10;
  const Replayed done = replay_of(scenario_, faster, routes_);
  EXPECT_LT(done.dispatch.us, base.dispatch.us);
  EXPECT_LT(done.combine.us, base.combine.us);
}

// The schedule holds each row and each route of the counts once.
TEST_P(ReplayLawTest, MovesWhatWasCounted) {
  const Replayed done = replay_of(scenario_, plain_model(), routes_);
  const Schedule& schedule = done.schedule;
  std::vector<RankTraffic> found(done.traffic.ranks.size());
  std::map<std::pair<int, int>, int64_t> arrivals;
  for (const Chunk& chunk : schedule.card_chunks) {
    found[static_cast<size_t>(chunk.source)].card_out += chunk.rows;
    found[static_cast<size_t>(chunk.target)].card_in += chunk.rows;
    EXPECT_LE(chunk.rows, kChunkArrivals);
    for (const Part& part : schedule.parts_of(chunk)) {
      arrivals[{chunk.source, part.rank}] += part.rows;
      found[static_cast<size_t>(part.rank)].routes += part.routes;
      EXPECT_LE(part.rows, chunk.rows);
    }
  }
  for (const Chunk& chunk : schedule.link_chunks) {
    const Part& part = schedule.link_parts[chunk.first_part];
    EXPECT_EQ(part.rank, chunk.target);
    EXPECT_EQ(part.rows, chunk.rows);
    arrivals[{chunk.source, part.rank}] += part.rows;
    found[static_cast<size_t>(part.rank)].routes += part.routes;
  }
  for (int rank = 0; rank < scenario_.num_ranks; ++rank) {
    const auto r = static_cast<size_t>(rank);
    EXPECT_EQ(found[r].card_out, done.traffic.ranks[r].card_out);
    EXPECT_EQ(found[r].card_in, done.traffic.ranks[r].card_in);
    EXPECT_EQ(found[r].routes, done.traffic.ranks[r].routes);
    for (int to = 0; to < scenario_.num_ranks; ++to) {
      EXPECT_EQ((arrivals[{rank, to}]), done.traffic.arrivals(rank, to));
    }
  }
}

// With one domain of many in full, the time stays near that of all.
TEST_P(ReplayLawTest, OneDomainStandsForAll) {
  const Model model = plain_model();
  const Simulation full = simulate(scenario_, model, routes_);
  const auto unheard = [](double) {};
  const Simulation sampled = simulate(scenario_, model, routes_, unheard, 0);
  EXPECT_EQ(full.num_replayed, scenario_.num_domains());
  EXPECT_EQ(sampled.num_replayed, 1);
  EXPECT_EQ(sampled.mean.card_out, full.mean.card_out);
  EXPECT_LE(sampled.dispatch_rows.us, full.dispatch_rows.us);
  EXPECT_NEAR(sampled.dispatch_rows.us / full.dispatch_rows.us, 1, 0.1);
  EXPECT_NEAR(sampled.combine_rows.us / full.combine_rows.us, 1, 0.1);
}

INSTANTIATE_TEST_SUITE_P(
    All,
    ReplayLawTest,
    testing::Combine(testing::Bool(), testing::Values(0.0, 1.0)),
    [](const testing::TestParamInfo<Law>& param) {
      return std::string(std::get<0>(param.param) ? "flat" : "by_domain") +
             (std::get<1>(param.param) > 0 ? "_skewed" : "_uniform");
    }
);

}  // namespace
}  // namespace weft::sim
