// SPDX-License-Identifier: Apache-2.0
#include "survive/ballots.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "support/process_memory.hpp"
#include "world.hpp"

namespace weft::test {
namespace {

// Returns whether `one` has ended a call without `other`.
bool goes_on_without(const Process& one, const Process& other) {
  return std::ranges::any_of(one.results, [&](const auto& result) {
    const Roll::Members& members = result.second;
    return !members.has(other.rank) || members.lives[static_cast<size_t>(other.rank)] != other.life;
  });
}

bool has(const Process& one, const Process& other) {
  const Roll::Members& members = one.ballots.agreed().members;
  return members.has(other.rank) && members.lives[static_cast<size_t>(other.rank)] == other.life;
}

// Expects that two processes that are members for each other have ended each call with the same
// members. Of two that are not, one at most goes on without the other: one that was left out and
// cannot hear of it has ended no call since.
void expect_agreement(const Process& a, const Process& b, uint64_t seed) {
  if (!has(a, b) || !has(b, a)) {
    ASSERT_FALSE(a.life + b.life == 0 && goes_on_without(a, b) && goes_on_without(b, a))
        << fmt::format("seed {}: ranks {} and {}", seed, a.rank, b.rank);
    return;
  }
  const Roll::Members& mine = a.ballots.agreed().members;
  const Roll::Members& theirs = b.ballots.agreed().members;
  ASSERT_TRUE(mine.epoch != theirs.epoch || are_same(mine, theirs)) << "seed " << seed;
  for (const auto& [call, members] : a.results) {
    const auto found = b.results.find(call);
    ASSERT_TRUE(found == b.results.end() || are_same(found->second, members))
        << fmt::format("seed {}, call {}: ranks {} and {}", seed, call, a.rank, b.rank);
  }
}

void expect_agreement(const World& world, uint64_t seed) {
  for (const auto& a : world.processes()) {
    for (const auto& b : world.processes()) {
      if (a != b && a->is_in() && b->is_in()) {
        expect_agreement(*a, *b, seed);
      }
    }
  }
}

// A sanitizer makes each take ten times as long.
constexpr uint64_t kNumWorlds = kIsSanitized ? 2'000 : 20'000;

void expect_all_finished(const World& world, uint64_t seed) {
  for (const auto& one : world.processes()) {
    ASSERT_TRUE(!one->is_in() || world.has_finished(*one))
        << fmt::format("seed {}, rank {}, life {}", seed, one->rank, one->life);
  }
}

TEST(BallotsTest, AllThatAreLeftEndAllCallsWithTheSameMembers) {
  for (uint64_t seed = 1; seed <= kNumWorlds; ++seed) {
    const int num_ranks = 2 + static_cast<int>(seed % 5);
    World world(num_ranks, 4, seed, {.deaths = num_ranks - 1});
    for (int step = 0; step < 200; ++step) {
      world.step();
    }
    world.settle();
    expect_agreement(world, seed);
    expect_all_finished(world, seed);
  }
}

// Ranks that are taken for silent are left out by more than half of the members, or by none, and
// then no rank goes on.
TEST(BallotsTest, NoTwoPartsGoOnWhenRanksAreTakenForSilent) {
  int num_stuck = 0;
  int num_out = 0;
  for (uint64_t seed = 1; seed <= kNumWorlds; ++seed) {
    const int num_ranks = 2 + static_cast<int>(seed % 5);
    World world(
        num_ranks,
        4,
        seed,
        {.deaths = static_cast<int>(seed / 5 % 3), .suspicions = static_cast<int>(seed % 3)}
    );
    const auto when_cut = static_cast<int>(seed / 7 % 300);  // or never
    for (int step = 0; step < 200; ++step) {
      world.step();
      if (step == when_cut) {
        world.cut();
      }
    }
    world.settle();
    expect_agreement(world, seed);
    for (const auto& one : world.processes()) {
      num_stuck += one->is_in() && !world.has_finished(*one) ? 1 : 0;
      num_out += one->ballots.is_out() ? 1 : 0;
    }
  }
  EXPECT_GT(num_stuck, 0);
  EXPECT_GT(num_out, 0);
}

// However often, and whoever dies meanwhile.
TEST(BallotsTest, NewProcessesEndAllCallsFromTheirFirstOnLikeTheOthers) {
  int num_back = 0;
  for (uint64_t seed = 1; seed <= kNumWorlds; ++seed) {
    const int num_ranks = 2 + static_cast<int>(seed % 5);
    World world(num_ranks, 8, seed, {.deaths = 1 + static_cast<int>(seed / 5 % 4), .returns = 4});
    for (int step = 0; step < 500; ++step) {
      world.step();
    }
    world.settle();
    expect_agreement(world, seed);
    expect_all_finished(world, seed);
    for (const auto& one : world.processes()) {
      num_back += one->life > 0 && one->is_in() ? 1 : 0;
    }
  }
  EXPECT_GT(num_back, static_cast<int>(kNumWorlds / 2));
}

TEST(BallotsTest, ASilentRankOfTwoIsNotLeftOut) {
  Ballots ballots(0, 0, first_of(2));
  EXPECT_FALSE(ballots.vote({Wish::kNone, Wish::kSilent}).is_agreed);
  EXPECT_TRUE(ballots.vote({Wish::kNone, Wish::kGone}).is_agreed);
  EXPECT_EQ(ballots.agreed().members.ranks, std::vector<int>{0});
}

// Ranks 0 and 1, which let a new process in the place of rank 2 in.
struct Return {
  Agreed two = {.members = {.epoch = 1, .ranks = {0, 1}, .lives = {0, 0, 0}}, .committed = 7};
  Ballots zero{0, 0, two};
  Ballots one{1, 0, two};
  Ballots newcomer{2, 1, two};

  Return() {
    const std::vector<Wish> back = {Wish::kNone, Wish::kNone, taken_in(1)};
    EXPECT_TRUE(zero.vote(back).is_vote);
    EXPECT_TRUE(one.hear(0, *zero.own_vote()).is_agreed);
    EXPECT_FALSE(newcomer.is_in());
  }
};

TEST(BallotsTest, ANewProcessIsLetInByTheVotesOfTheOthers) {
  Return world;
  EXPECT_EQ(world.one.agreed().members.ranks, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(world.one.agreed().members.lives, (std::vector<uint64_t>{0, 0, 1}));
  EXPECT_FALSE(world.newcomer.hear(1, world.one.agreed()).is_agreed) << "it tells nobody";
  EXPECT_TRUE(world.newcomer.is_in());
  EXPECT_EQ(world.newcomer.agreed().committed, 7U);
  EXPECT_TRUE(world.zero.hear(1, world.one.agreed()).is_agreed);
  Ballots older(2, 0, world.two);
  static_cast<void>(older.hear(1, world.one.agreed()));
  EXPECT_FALSE(older.is_in()) << "the process before it";
}

TEST(BallotsTest, ANewProcessDoesNotCountAmongTheHalfAtFirst) {
  Return world;
  static_cast<void>(world.newcomer.hear(1, world.one.agreed()));
  static_cast<void>(world.zero.hear(1, world.one.agreed()));
  const std::vector<Wish> without_one = {Wish::kNone, Wish::kSilent, Wish::kNone};
  EXPECT_TRUE(world.zero.vote(without_one).is_vote);
  EXPECT_FALSE(world.newcomer.hear(0, *world.zero.own_vote()).is_agreed);
  EXPECT_FALSE(world.zero.hear(2, *world.newcomer.own_vote()).is_agreed) << "one of two old ones";
  const std::vector<Wish> one_is_gone = {Wish::kNone, Wish::kGone, Wish::kNone};
  EXPECT_FALSE(world.zero.vote(one_is_gone).is_agreed);
  EXPECT_TRUE(world.newcomer.hear(0, *world.zero.own_vote()).is_agreed);
  EXPECT_EQ(world.newcomer.agreed().members.ranks, (std::vector<int>{0, 2}));
}

TEST(BallotsTest, ANewProcessThatHearsOfTwoSetsIsOutIfItHasBegunWithTheWrongOne) {
  Return world;
  Agreed fewer = world.one.agreed();
  fewer.members.ranks = {1, 2};  // rank 0 was gone for those who decided
  Ballots right = world.newcomer;
  static_cast<void>(world.newcomer.hear(0, world.one.agreed()));
  static_cast<void>(world.newcomer.hear(1, fewer));
  EXPECT_TRUE(world.newcomer.is_out());
  EXPECT_FALSE(world.newcomer.agreed().members.has(2));
  static_cast<void>(right.hear(1, fewer));
  static_cast<void>(right.hear(0, world.one.agreed()));
  EXPECT_FALSE(right.is_out());
  EXPECT_EQ(right.agreed().members.ranks, (std::vector<int>{1, 2}));
}

TEST(BallotsTest, WhatIsMalformedChangesNothing) {
  Ballots ballots(0, 0, first_of(3));
  EXPECT_FALSE(ballots.hear(1, Vote{.epoch = 0, .committed = 9, .wishes = {}}).is_vote);
  EXPECT_FALSE(
      ballots.hear(1, Agreed{.members = {.epoch = 7, .ranks = {}, .lives = {}}, .committed = 9})
          .is_agreed
  );
  EXPECT_FALSE(ballots.is_out());
  EXPECT_EQ(ballots.own_vote(), nullptr);
  EXPECT_EQ(ballots.agreed().members.epoch, 0U);
}

}  // namespace
}  // namespace weft::test
