// SPDX-License-Identifier: Apache-2.0
// Ranks that agree by messages, in a world without time: what is sent arrives in order on each
// connection and at any moment, ranks die between any two steps and lose what they have sent last,
// and ranks that live are taken for silent.
#include "survive/ballots.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <variant>
#include <vector>

#include "plan/random_routing.hpp"

namespace weft::test {
namespace {

struct Arrived {
  uint64_t epoch = 0;
  uint64_t call = 0;
};
struct Ended {};  // the connection is closed
using Message = std::variant<Arrived, Vote, Agreed, Ended>;

Agreed first_of(int num_ranks) {
  Agreed first;
  first.members.ranks.resize(static_cast<size_t>(num_ranks));
  std::iota(first.members.ranks.begin(), first.members.ranks.end(), 0);
  first.members.lives.resize(static_cast<size_t>(num_ranks));
  return first;
}

// What the members of a call were when it was over, by call.
using Results = std::map<uint64_t, std::vector<int>>;

class World {
 public:
  World(int num_ranks, uint64_t num_calls, uint64_t seed)
      : num_ranks_(num_ranks), num_calls_(num_calls), random_(seed) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      ranks_.emplace_back(rank, first_of(num_ranks));
    }
    links_.resize(static_cast<size_t>(num_ranks * num_ranks));
  }

  void step(int deaths, int suspicions) {
    const uint64_t what = random_.below(100);
    const int rank = pick();
    if (what < 3 && deaths_ < deaths) {
      die(rank);
    } else if (what < 6 && suspicions_ < suspicions) {
      ++suspicions_;
      give_up(rank, pick(), Wish::kSilent);
    } else if (what < 40) {
      act(rank);
    } else {
      deliver(rank, pick());
    }
  }

  // Ranks of two sides hear nothing of each other any more.
  void cut() {
    is_cut_ = true;
    for (Rank& rank : ranks_) {
      rank.side = random_.below(2);
    }
  }

  // All that has been sent comes, and all ranks go on as far as they can.
  void settle() {
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      for (int rank = 0; rank < num_ranks_; ++rank) {
        has_moved = act(rank) || has_moved;
        for (int from = 0; from < num_ranks_; ++from) {
          has_moved = deliver(rank, from) || has_moved;
        }
      }
    }
  }

  [[nodiscard]] bool is_in(int rank) const {
    return !ranks_[at(rank)].is_dead && !ranks_[at(rank)].ballots.is_out();
  }
  [[nodiscard]] bool has_finished(int rank) const {
    return ranks_[at(rank)].results.size() == num_calls_;
  }
  [[nodiscard]] const Results& results(int rank) const { return ranks_[at(rank)].results; }
  [[nodiscard]] const Agreed& agreed(int rank) const { return ranks_[at(rank)].ballots.agreed(); }
  [[nodiscard]] int num_ranks() const { return num_ranks_; }

 private:
  struct Rank {
    Rank(int rank, Agreed first) : ballots(rank, 0, std::move(first)) {}
    Ballots ballots;
    bool is_dead = false;
    uint64_t call = 1;         // that it makes
    Roll::Members with;        // with whom it has arrived
    bool has_arrived = false;  // at `call`, with these
    std::vector<int> dead;     // as it knows
    uint64_t side = 0;         // of a cut
    Results results;
  };

  [[nodiscard]] static size_t at(int rank) { return static_cast<size_t>(rank); }
  [[nodiscard]] int pick() { return static_cast<int>(random_.below(at(num_ranks_))); }
  [[nodiscard]] std::deque<Message>& link(int from, int to) {
    return links_[at(from * num_ranks_ + to)];
  }

  void send(int from, const Message& message) {
    for (int to = 0; to < num_ranks_; ++to) {
      if (to != from && !ranks_[at(to)].is_dead) {
        link(from, to).push_back(message);
      }
    }
  }

  void tell(int rank, const Ballots::News& news) {
    const Ballots& ballots = ranks_[at(rank)].ballots;
    if (news.is_vote && ballots.own_vote() != nullptr) {
      send(rank, *ballots.own_vote());
    }
    if (news.is_agreed) {
      send(rank, ballots.agreed());
    }
  }

  void die(int rank) {
    if (ranks_[at(rank)].is_dead) {
      return;
    }
    ++deaths_;
    ranks_[at(rank)].is_dead = true;
    for (int to = 0; to < num_ranks_; ++to) {
      std::deque<Message>& sent = link(rank, to);
      sent.resize(random_.below(sent.size() + 1));
      sent.emplace_back(Ended());
    }
  }

  void give_up(int rank, int other, Wish wish) {
    Rank& self = ranks_[at(rank)];
    if (self.is_dead || rank == other || !self.ballots.agreed().members.has(other)) {
      return;
    }
    std::vector<Wish> wishes(at(num_ranks_));
    wishes[at(other)] = wish;
    tell(rank, self.ballots.vote(wishes));
  }

  // The rank's own thread: it arrives, returns, or makes its call again. False: it waits.
  bool act(int rank) {
    Rank& self = ranks_[at(rank)];
    if (self.is_dead || self.ballots.is_out() || self.call > num_calls_) {
      return false;
    }
    const Agreed& now = self.ballots.agreed();
    if (self.has_arrived && now.committed == self.call) {
      self.results[self.call++] = self.with.ranks;
      self.has_arrived = false;
      return true;
    }
    if (!self.has_arrived || now.members.epoch != self.with.epoch) {
      self.has_arrived = true;
      self.with = now.members;
      self.ballots.arrive(rank, self.with.epoch, self.call);
      send(rank, Arrived{self.with.epoch, self.call});
      return true;
    }
    for (int other = 0; other < num_ranks_; ++other) {
      const Wish wish = wish_for(self, other);
      const Vote* own = self.ballots.own_vote();
      const Wish told = own == nullptr ? Wish::kNone : own->wishes[at(other)];
      if (now.members.has(other) && wish > told) {
        give_up(rank, other, wish);
        return true;
      }
    }
    return false;
  }

  [[nodiscard]] Wish wish_for(const Rank& self, int other) const {
    if (std::ranges::find(self.dead, other) != self.dead.end()) {
      return Wish::kGone;
    }
    return is_cut_ && ranks_[at(other)].side != self.side ? Wish::kSilent : Wish::kNone;
  }

  bool deliver(int to, int from) {
    std::deque<Message>& sent = link(from, to);
    const bool is_cut_off = is_cut_ && ranks_[at(to)].side != ranks_[at(from)].side;
    if (to == from || sent.empty() || ranks_[at(to)].is_dead || is_cut_off) {
      return false;
    }
    const Message message = std::move(sent.front());
    sent.pop_front();
    Rank& self = ranks_[at(to)];
    if (const auto* arrived = std::get_if<Arrived>(&message)) {
      self.ballots.arrive(from, arrived->epoch, arrived->call);
    } else if (const auto* vote = std::get_if<Vote>(&message)) {
      tell(to, self.ballots.hear(from, *vote));
    } else if (const auto* agreed = std::get_if<Agreed>(&message)) {
      tell(to, self.ballots.hear(from, *agreed));
    } else {
      self.dead.push_back(from);
    }
    return true;
  }

  int num_ranks_;
  uint64_t num_calls_;
  RandomSource random_;
  int deaths_ = 0;
  int suspicions_ = 0;
  bool is_cut_ = false;
  std::vector<Rank> ranks_;
  std::vector<std::deque<Message>> links_;  // by sender, then receiver
};

// Whether the rank has ended a call without the other.
bool goes_on_without(const Results& results, int other) {
  return std::ranges::any_of(results, [&](const auto& result) {
    return !std::ranges::binary_search(result.second, other);
  });
}

// Ranks that are members for each other have ended each call with the same members. Of two that are
// not, one at most goes on without the other: who was left out and cannot hear of it has ended no
// call since.
void expect_agreement(const World& world, int a, int b, uint64_t seed) {
  const Roll::Members& mine = world.agreed(a).members;
  const Roll::Members& theirs = world.agreed(b).members;
  if (!mine.has(b) || !theirs.has(a)) {
    ASSERT_FALSE(goes_on_without(world.results(a), b) && goes_on_without(world.results(b), a))
        << fmt::format("seed {}: ranks {} and {}", seed, a, b);
    return;
  }
  ASSERT_TRUE(mine.epoch != theirs.epoch || mine.ranks == theirs.ranks) << "seed " << seed;
  for (const auto& [call, members] : world.results(a)) {
    const auto found = world.results(b).find(call);
    ASSERT_TRUE(found == world.results(b).end() || found->second == members)
        << fmt::format("seed {}, call {}: ranks {} and {}", seed, call, a, b);
  }
}

void expect_agreement(const World& world, uint64_t seed) {
  for (int a = 0; a < world.num_ranks(); ++a) {
    for (int b = 0; b < a; ++b) {
      if (world.is_in(a) && world.is_in(b)) {
        expect_agreement(world, a, b, seed);
      }
    }
  }
}

TEST(BallotsTest, AllThatAreLeftEndAllCallsWithTheSameMembers) {
  for (uint64_t seed = 1; seed <= 20'000; ++seed) {
    const int num_ranks = 2 + static_cast<int>(seed % 5);
    World world(num_ranks, 4, seed);
    for (int step = 0; step < 200; ++step) {
      world.step(num_ranks - 1, 0);
    }
    world.settle();
    expect_agreement(world, seed);
    for (int rank = 0; rank < num_ranks; ++rank) {
      ASSERT_TRUE(!world.is_in(rank) || world.has_finished(rank))
          << "seed " << seed << ", rank " << rank;
    }
  }
}

// Those who are taken for silent are left out by more than half of the members, or by nobody, and
// then nobody goes on.
TEST(BallotsTest, NoTwoPartsGoOnWhenRanksAreTakenForSilent) {
  int num_stuck = 0;
  int num_out = 0;
  for (uint64_t seed = 1; seed <= 20'000; ++seed) {
    const int num_ranks = 2 + static_cast<int>(seed % 5);
    World world(num_ranks, 4, seed);
    const auto when_cut = static_cast<int>(seed / 7 % 300);  // or never
    for (int step = 0; step < 200; ++step) {
      world.step(static_cast<int>(seed / 5 % 3), static_cast<int>(seed % 3));
      if (step == when_cut) {
        world.cut();
      }
    }
    world.settle();
    expect_agreement(world, seed);
    for (int rank = 0; rank < num_ranks; ++rank) {
      num_stuck += world.is_in(rank) && !world.has_finished(rank) ? 1 : 0;
      num_out += world.is_in(rank) ? 0 : 1;
    }
  }
  EXPECT_GT(num_stuck, 0);
  EXPECT_GT(num_out, 0);
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
    const std::vector<Wish> back = {Wish::kNone, Wish::kNone, Wish::kBack};
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
