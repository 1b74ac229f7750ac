// SPDX-License-Identifier: Apache-2.0
// How ranks agree by messages on who is a member and which call is over, as one of them sees it.
// Pure: who sends and receives is message_roll.hpp. tests/model/ballots.pml is the model of it.
//
// Members tell each other of a call that they have arrived; a rank that has heard so of all, and
// has not voted, counts it as over.
//
// A rank that has seen that a member is gone votes: for the members without it, and says up to
// which call it has seen the end. From then on it counts no call as over in this epoch, and takes
// nothing more from who is gone by its vote. A rank that hears a vote adds its wishes to its own,
// so that votes only grow until all that shall stay have the same; a rank that sees that has the
// next members, tells them to all, and votes no more in this epoch. The last call that is over is
// then the last that any of them had counted, since none that stays may have returned from a call
// that others make again.
//
// That a rank is gone may be proven: its connection was closed, its process has ended. Or it is
// silent, and may only be out of reach, beyond a cut link, with others who think the same of the
// ranks here. So a silent rank is left out only if more than half of the members stay: two such
// sets would have a rank in common.
//
// A new process in the place of a lost rank is let in by votes, too, but not by its own. Votes name
// it by its life, which no other process has, so that all agree on one of several that come. It
// may hear of two sets of members for its first epoch. The set with fewer of the members before
// counts then, as votes only grow, and those who had decided for the other set are gone; a new
// process that has begun with the other is out, and may join again. It does not pass on the set
// that let it in, since a rank that had voted for others would not take it from the rank that sent
// it; and in its first epoch it does not count among the half of the members.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "survive/roll.hpp"

namespace weft {

// Says what is to become of a rank. Of two wishes the larger counts.
enum class Wish : uint64_t {
  kNone,    // as it is
  kSilent,  // a member that is to go: it does not answer
  kGone,    // likewise: its end is proven
};
// Returns the wish to take in the process with this life, not 0, in the place of a lost rank.
constexpr Wish taken_in(uint64_t life) {
  return static_cast<Wish>(static_cast<uint64_t>(Wish::kGone) + life);
}
// Returns the life that `wish` takes in; 0: none.
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

  // `life` is that of this rank, which may not be a member yet.
  Ballots(int rank, uint64_t life, Agreed first);

  [[nodiscard]] const Agreed& agreed() const { return agreed_; }
  // Null if this rank has not voted in this epoch.
  [[nodiscard]] const Vote* own_vote() const { return vote_of(rank_); }
  // This rank is a member.
  [[nodiscard]] bool is_in() const;
  // This rank was a member, and the others have left it out.
  [[nodiscard]] bool is_out() const { return is_out_; }
  [[nodiscard]] bool has_arrived(int rank, uint64_t epoch, uint64_t call) const;
  // This rank has voted for members with `rank`, which has not voted for the same yet, or without
  // it for its silence, which its proven end would make up for.
  [[nodiscard]] bool lacks_word_of(int rank) const;

  // Notes that `rank`, perhaps this one, has arrived.
  void arrive(int rank, uint64_t epoch, uint64_t call);
  // Votes for `wishes`, by rank, and for all that this rank has voted for before.
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
  // Begins the next epoch if all that stay by this rank's vote have voted the same; else false.
  [[nodiscard]] bool decide();
  void take(const Agreed& agreed);
  // Returns those of `members` that were so in the epoch before, in the same lives.
  [[nodiscard]] std::vector<int> old_ones(const Roll::Members& members) const;

  int rank_;
  uint64_t life_;
  Agreed agreed_;
  Roll::Members before_;  // of the epoch before
  bool is_out_ = false;
  std::vector<Arrival> arrivals_;           // by rank
  std::vector<std::optional<Vote>> votes_;  // by rank, of this epoch
};

}  // namespace weft
