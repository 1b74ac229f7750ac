// SPDX-License-Identifier: Apache-2.0
// Exchange::grow: ranks that are left, and those that come back, have room for larger calls.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <optional>
#include <sys/resource.h>
#include <thread>
#include <vector>

#include "core/clock.hpp"
#include "fault/survival_cases.hpp"
#include "plan/random_routing.hpp"
#include "support/errors.hpp"
#include "survivors/shared.hpp"
#include "survivors/spare.hpp"
#include "survivors/survivors.hpp"

namespace weft::test {
namespace {

constexpr int64_t kFewTokens = 20;

// Rounds of more tokens and choices than an exchange of `few_of(setup)` has room for.
ExchangeSetup many_of(int num_ranks) {
  ExchangeSetup setup = setup_of(num_ranks, "shm");
  setup.max_tokens = 300;
  setup.max_topk = 4;
  return setup;
}

ExchangeSetup few_of(ExchangeSetup setup) {
  setup.max_tokens = kFewTokens;
  setup.max_topk = 1;
  return setup;
}

Case choices(int topk) {
  Case spec;
  spec.topk = topk;
  return spec;
}

// Returns what grow() throws or answers other than `has_grown`; empty if neither.
std::string grow(Exchange& exchange, int64_t max_tokens, int max_topk, bool has_grown) {
  bool is_larger = false;
  const auto thrown = thrown_by([&] { is_larger = exchange.grow(max_tokens, max_topk); });
  std::string said = thrown ? text_of(thrown) : "";
  if (is_larger != has_grown) {
    said += fmt::format("grow: {} for {}, {}", is_larger, max_tokens, max_topk);
  }
  return said;
}

// Each size grows to the largest that any rank left asks for; plans from before go on, and a
// process that comes back with the sizes of the first exchange has those of the others.
TEST(GrowthTest, RanksThatAreLeftGrowTogether) {
  const ExchangeSetup many = many_of(4);
  const ExchangeSetup few = few_of(many);
  const SurvivorRounds small(few, choices(1));
  const SurvivorRounds large(many, choices(4));
  const Shared<Letter> letter;
  const Spare spare([&] {
    Exchange exchange = shrinking(Group::rejoin(1, letter->await()), few);
    const bool has_sizes = exchange.config().max_tokens == 300 && exchange.config().max_topk == 4;
    return verdict(large.run(exchange, 7) + (has_sizes ? "" : "it has the sizes of before"));
  });
  const auto statuses = run_forked(4, [&](const Group& group) {
    Exchange exchange = shrinking(group, few);
    std::string problem = small.run(exchange, 1, [&](int call) {
      if (group.rank() == 1 && call == 1) {
        std::raise(SIGKILL);
      }
    });
    const bool is_large = group.rank() == 2;
    const SurvivorRounds::Round before = small.call(exchange, 2, [&](int call) {
      if (call == 2) {  // between dispatch and combine
        problem += grow(exchange, is_large ? 300 : 1, is_large ? 1 : 4, true);
      }
    });
    problem += small.problem_of(before, group.rank());
    problem += grow(exchange, 300, 3, false);
    problem += large.run(exchange, 3);
    if (group.rank() == 0) {
      letter->send(exchange);
    }
    exchange.readmit(std::vector<int>{1});
    return verdict(problem + large.run(exchange, 7));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0, 0}));
  EXPECT_EQ(spare.status(), 0);
}

TEST(GrowthTest, RanksMayBeLostMeanwhile) {
  const ExchangeSetup many = many_of(4);
  const SurvivorRounds large(many, choices(4));
  for (uint64_t seed = 0; seed < 24; ++seed) {
    const auto statuses = run_forked(4, [&](const Group& group) {
      Exchange exchange = shrinking(group, few_of(many));
      std::string problem = SurvivorRounds(few_of(many), choices(1)).run(exchange, seed);
      group.barrier();
      const std::chrono::microseconds after(RandomSource(seed).below(4000));
      std::optional<std::jthread> death;
      if (group.rank() == static_cast<int>(seed % 4)) {
        death.emplace([after] {
          std::this_thread::sleep_for(after);
          std::raise(SIGKILL);
        });
      }
      problem += grow(exchange, 300, 4, true);
      for (uint64_t round = 0; round < 3; ++round) {
        problem += large.run(exchange, 10 * seed + round);
      }
      if (death) {
        death->join();
      }
      return verdict(problem);
    });
    std::vector<int> wanted(4, 0);
    wanted[seed % 4] = 128 + SIGKILL;
    EXPECT_EQ(statuses, wanted) << "seed " << seed;
  }
}

// Rank 1 may have no file of a megabyte for a while, and memory that ranks share is one.
TEST(GrowthTest, IsRefusedOnAllAndTriedAgainWhereOneHasNoMemoryForIt) {
  const ExchangeSetup many = many_of(3);
  const SurvivorRounds small(few_of(many), choices(1));
  const SurvivorRounds large(many, choices(4));
  const auto statuses = run_forked(3, [&](const Group& group) {
    Exchange exchange = shrinking(group, few_of(many));
    std::string problem = small.run(exchange, 1);
    const rlimit little = {.rlim_cur = 1 << 20, .rlim_max = RLIM_INFINITY};
    if (group.rank() == 1) {
      std::signal(SIGXFSZ, SIG_IGN);
      ::setrlimit(RLIMIT_FSIZE, &little);
    }
    const std::string said = grow(exchange, 1 << 20, 4, false);
    if (said.find("on rank 1") == std::string::npos) {
      problem += "growth: " + said;
    }
    if (exchange.config().max_tokens != kFewTokens) {
      problem += "it has the sizes that it was to have";
    }
    problem += small.run(exchange, 2);
    const rlimit enough = {.rlim_cur = RLIM_INFINITY, .rlim_max = RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &enough);
    problem += grow(exchange, 300, 4, true);
    return verdict(problem + large.run(exchange, 3));
  });
  EXPECT_EQ(statuses, std::vector<int>(3, 0));
}

TEST(GrowthTest, RefusesOnEveryRankWhatCannotBe) {
  const ExchangeSetup many = many_of(3);
  run_threads(3, [&](Group& group) {
    ExchangeSetup few = few_of(many);
    few.transport = "loopback";
    Exchange exchange = shrinking(group, few);
    const bool is_wrong = group.rank() == 1;
    const auto thrown = thrown_by([&] { exchange.grow(100, is_wrong ? 1000 : 1); });
    ASSERT_TRUE(thrown);
    EXPECT_EQ(thrown->code, ErrorCode::kInvalidArgument);
    EXPECT_NE(thrown->text.find("max_topk = 1000"), std::string::npos) << thrown->text;
    EXPECT_EQ(exchange.config().max_tokens, kFewTokens);
    EXPECT_EQ(grow(exchange, 300, 4, true), "");
    EXPECT_EQ(SurvivorRounds(many, choices(4)).run(exchange, 1), "");
    Exchange usual(group, many.config());
    EXPECT_EQ(thrown_by([&] { usual.grow(500, 4); })->code, ErrorCode::kUnsupported);
  });
}

}  // namespace
}  // namespace weft::test
