// SPDX-License-Identifier: Apache-2.0
// PeerLoss::kShrink among ranks of several domains: what only they can meet.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

#include "fault/survival_cases.hpp"
#include "support/errors.hpp"
#include "survivors/shared.hpp"
#include "survivors/spare.hpp"
#include "survivors/storm.hpp"

namespace weft::test {
namespace {

ExchangeSetup domains_of_one(int num_ranks) {
  ExchangeSetup setup = setup_of(num_ranks, "ofi:tcp");
  for (int rank = 0; rank < num_ranks; ++rank) {
    setup.domain_of.push_back(rank);
  }
  return setup;
}

// One of two cannot know whether it is itself that is cut off: it leaves, which the other hears of.
TEST(DomainsSurvivalTest, OfTwoRanksASilentOneIsNotGivenUp) {
  ExchangeSetup setup = domains_of_one(2);
  const SurvivorRounds rounds(setup, {});
  const Shared<std::atomic<pid_t>> stopped;
  const auto statuses = run_forked(2, [&](const Group& group) {
    setup.timeout = std::chrono::seconds(group.rank() == 1 ? 60 : 1);
    Exchange exchange = shrinking(group, setup);
    std::string problem = rounds.run(exchange, 0);
    if (group.rank() == 1) {
      stopped->store(::getpid());
      std::raise(SIGSTOP);
    }
    const auto thrown = thrown_by([&] { problem += rounds.run(exchange, 1); });
    const bool is_right = group.rank() == 0 ? thrown && thrown->is_timeout
                                            : !thrown && text(exchange.report().alive) == "1";
    if (group.rank() == 0) {
      ::kill(stopped->load(), SIGCONT);
    }
    return verdict(is_right ? problem : problem + text_of(thrown));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

// Rank 2 is lost again and again, and each time a new process takes its place.
TEST(DomainsSurvivalTest, NewProcessesTakeThePlaceOfALostRank) {
  constexpr int kNumLives = 3;
  const ExchangeSetup setup = domains_of_one(3);
  const SurvivorRounds rounds(setup, {});
  const Shared<std::array<Letter, kNumLives>> letters;
  const auto live = [&](Exchange& exchange, int life) {
    const bool is_mortal = exchange.rank() == 2 && life + 1 < kNumLives;
    std::string problem = rounds.run(exchange, static_cast<uint64_t>(10 * life));
    return problem + rounds.run(exchange, static_cast<uint64_t>(10 * life + 1), [&](int call) {
      if (is_mortal && call == 1) {
        std::raise(SIGKILL);
      }
    });
  };
  std::vector<std::unique_ptr<Spare>> spares;
  for (int life = 1; life < kNumLives; ++life) {
    spares.push_back(std::make_unique<Spare>([&, life] {
      const char* const invitation = (*letters)[static_cast<size_t>(life)].await();
      Exchange exchange = shrinking(Group::rejoin(2, invitation), setup);
      return verdict(live(exchange, life));
    }));
  }
  const auto statuses = run_forked(3, [&](const Group& group) {
    Exchange exchange = shrinking(group, setup);
    std::string problem = live(exchange, 0);
    for (int life = 1; life < kNumLives; ++life) {
      if (group.rank() == 1) {  // whose word counts as well as that of the first
        (*letters)[static_cast<size_t>(life)].send(exchange);
      }
      exchange.readmit(std::vector<int>{2});
      problem += live(exchange, life);
    }
    return verdict(problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 128 + SIGKILL}));
  EXPECT_EQ(spares[0]->status(), 128 + SIGKILL);
  EXPECT_EQ(spares[1]->status(), 0);
}

// Rank 0 waits for a new process in the place of rank 2, and rank 1 is stopped: no half agrees that
// nobody has come.
TEST(DomainsSurvivalTest, AReadmissionEndsWhereNobodyAgrees) {
  ExchangeSetup setup = domains_of_one(3);
  const SurvivorRounds rounds(setup, {});
  const Shared<std::atomic<pid_t>> stopped;
  const auto statuses = run_forked(3, [&](const Group& group) {
    setup.timeout = std::chrono::seconds(group.rank() == 1 ? 60 : 1);
    Exchange exchange = shrinking(group, setup);
    std::string problem = rounds.run(exchange, 0, [&](int call) {
      if (group.rank() == 2 && call == 1) {
        std::raise(SIGKILL);
      }
    });
    if (group.rank() == 1) {
      stopped->store(::getpid());
      std::raise(SIGSTOP);
      return verdict(problem);
    }
    const auto thrown = thrown_by([&] { exchange.readmit(std::vector<int>{2}); });
    if (!thrown || !thrown->is_timeout ||
        text_of(thrown).find("no word from rank 1 on rank 2") == std::string::npos) {
      problem += text_of(thrown);
    }
    ::kill(stopped->load(), SIGCONT);
    return verdict(problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 128 + SIGKILL}));
}

TEST(DomainsSurvivalTest, AStormOfDeaths) {
  const StormCount count = run_storms(15, {.has_domains = true});
  EXPECT_GE(count.lost(), 15);
  EXPECT_EQ(count.wrong + count.hung, 0) << "stderr names the seed";
  EXPECT_GT(count.killed, 0);
  EXPECT_GT(count.left, 0);
  EXPECT_GT(count.returned, 0);
}

}  // namespace
}  // namespace weft::test
