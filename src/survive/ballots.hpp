// SPDX-License-Identifier: Apache-2.0
// How ranks agree by messages on who is a member and which call is over, as one of them sees it.
// Pure: who sends and receives is message_roll.hpp. tests/model/ballots.pml is the model of it.
//
// Members tell each other of a call that they have arrived; a rank that has heard so of all, and
// has not voted, counts it as over.
//
// A rank that has seen that a member is gone votes: for the members without it, and says up to
// which call it has seen the end. From then on it counts no call as over in this epoch, and takes
// nothing more from who is gone by its vote. Who hears a vote makes its wishes its own, so that
// votes only grow until all that shall stay have the same; whoever sees that has the next members,
// tells them to all, and votes no more in this epoch. The last call that is over is then the last
// that any of them had counted, since none that stays may have returned from a call that others
// make again.
//
// That a rank is gone may be proven: its connection was closed, its process has ended. Or it is
// silent, and may only be out of reach, beyond a cut link, with others who think the same of the
// ranks here. So a silent rank is left out only if more than half of the members stay: two such
// sets would have a rank in common.
//
// A new process in the place of a lost rank is let in by votes, too, but not by its own. Votes name
// it by its life, which no other process has, so that all agree on one of several that come. It
// may hear of two sets for its first epoch. The one with fewer of the members before counts then,
// as votes only grow, and those who had decided for the other one are gone; whoever has begun with
// that one is out, and may join again. It tells nobody of the members that it is one of, since who
// had voted for others would not take them from who has told it; and in its first epoch it does not
// count among the half of the members.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "survive/roll.hpp"

namespace weft {

// Wish for what is to become of a rank. The larger one counts.
enum class Wish : uint64_t {
  kNone,    // as it is
  kSilent,  // a member that is to go: it does not answer
  kGone,    // likewise: its end is proven
};
// A new process with this life, not 0, is to be a member in the place of a lost rank.
constexpr Wish taken_in(uint64_t life) {
  return static_cast<Wish>(static_cast<uint64_t>(Wish::kGone) + life);
}
// 0: of none.
constexpr uint64_t life_in(Wish wish) {
  return wish <= Wish::kGone ? 0 : static_cast<uint64_t>(wish) - static_cast<uint64_t>(Wish::kGone);
}

struct Vote {
  uint64_t epoch = 0;      // which it wants to end
  uint64_t committed = 0;  // the last call that is over, as its rank has seen
  std::vector<Wish> wishes;
};

struct Agreed {
  Roll::Members members;
  uint64_t committed = 0;
};

class Ballots {
 public:
  // Messages that others must get, in this order: own_vote(), agreed().
  struct News {
    bool is_vote = false;
    bool is_agreed = false;
  };

  // `life`: of this rank, which may be none of the members yet.
  Ballots(int rank, uint64_t life, Agreed first);

  [[nodiscard]] const Agreed& agreed() const { return agreed_; }
  // Null: it has not voted in this epoch.
  [[nodiscard]] const Vote* own_vote() const { return vote_of(rank_); }
  // It is a member.
  [[nodiscard]] bool is_in() const;
  // It was one, and the others have left it out.
  [[nodiscard]] bool is_out() const { return is_out_; }
  [[nodiscard]] bool has_arrived(int rank, uint64_t epoch, uint64_t call) const;
  // This rank has voted for members with `rank`, which has not voted for the same yet, or without
  // it for its silence, which its proven end would make up for.
  [[nodiscard]] bool lacks_word_of(int rank) const;

  // The rank, or this one, has arrived.
  void arrive(int rank, uint64_t epoch, uint64_t call);
  // This rank votes for these, by rank, and for all that it has voted for before.
  [[nodiscard]] News vote(const std::vector<Wish>& wishes);
  // Takes in what another rank says.
  [[nodiscard]] News hear(int rank, const Vote& vote);
  [[nodiscard]] News hear(int rank, const Agreed& agreed);

 private:
  struct Arrival {
    uint64_t epoch = 0;
    uint64_t call = 0;
  };

  [[nodiscard]] bool is_among(const Roll::Members& members) const;
  [[nodiscard]] const Vote* vote_of(int rank) const;
  // This rank's vote leaves it out.
  [[nodiscard]] bool leaves_out(int rank) const;
  // If all that stay by this rank's vote have the same.
  [[nodiscard]] bool decide();
  void take(const Agreed& agreed);
  // The members that have been so in the epoch before, in the same lives.
  [[nodiscard]] std::vector<int> old_ones(const Roll::Members& members) const;

  int rank_;
  uint64_t life_;
  Agreed agreed_;
  Roll::Members before_;  // agreed_'s
  bool is_out_ = false;
  std::vector<Arrival> arrivals_;           // by rank
  std::vector<std::optional<Vote>> votes_;  // by rank, of this epoch
};

}  // namespace weft
