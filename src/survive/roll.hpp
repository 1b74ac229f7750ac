// SPDX-License-Identifier: Apache-2.0
// A roll holds what ranks know of each other's lives. By it they agree on who is a member and, at
// the end of each call, that all members have what they need, and depend on no single rank:
//
//   arrive    I have all that I need of call n, and have given all that others need. Once all
//             members say so the call is over, and may return on all.
//   propose   A member is gone. Once there are other members the call before can no longer end
//             with the one that is gone, if it has not yet.
//
// So a call ends with the same members on all ranks, whatever rank dies. Ranks of one host
// agree by memory that all of them map (shared_roll.hpp), those of several by messages
// (message_roll.hpp).
//
// A place among the ranks is taken by one life after the other: by the process that began there,
// then by those that join again. Which life a place is at is agreed on with the members.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "group/invitation.hpp"
#include "weft/group.hpp"

namespace weft {

class Roll {
 public:
  // Longest block of post().
  static constexpr size_t kMailBytes = 4096;

  // Ranks that go on together.
  struct Members {
    uint64_t epoch = 0;
    std::vector<int> ranks;       // ascending
    std::vector<uint64_t> lives;  // by rank, of all: the last that has been a member

    [[nodiscard]] bool has(int rank) const;
    // Returns the ranks that are not among `others` in the same life.
    [[nodiscard]] std::vector<int> beside(const Members& others) const;
  };

  virtual ~Roll() = default;

  // --- any thread ---
  [[nodiscard]] virtual uint64_t epoch() const = 0;
  // Counts one beat of this rank, by which others see that it is not stopped.
  virtual void beat() = 0;
  [[nodiscard]] virtual uint64_t beats(int rank) const = 0;
  // The rank's process has ended, or the rank has left.
  [[nodiscard]] virtual bool has_ended(int rank) const = 0;
  [[nodiscard]] virtual bool has_left(int rank) const = 0;
  // A number that moves whenever something changes; sleep() ends when it differs from `seen`.
  [[nodiscard]] virtual uint32_t doorbell() const = 0;
  virtual void sleep(uint32_t seen, std::chrono::nanoseconds at_most) = 0;

  // --- this rank's thread ---
  [[nodiscard]] virtual Members members() const = 0;
  // This rank is a member, in this life of its place.
  [[nodiscard]] virtual bool is_in(const Members& members) const = 0;
  // Makes questions about a rank mean its life among these from now on.
  virtual void follow(const Members& members) = 0;
  // The last call that is over for all members.
  [[nodiscard]] virtual uint64_t committed() const = 0;
  virtual void leave() = 0;
  // Tells that this rank has all that it needs of the call. Calls are numbered from 1.
  virtual void arrive(const Members& with, uint64_t call) = 0;
  [[nodiscard]] virtual bool has_arrived(int rank, const Members& with, uint64_t call) const = 0;
  // Returns whether the rank owes something: its arrival, or its agreement to a proposal.
  [[nodiscard]] virtual bool is_awaited(int rank, const Members& with, uint64_t call) const {
    return !has_arrived(rank, with, call);
  }
  // Returns whether the call is over for all members, which it is as soon as all have arrived.
  [[nodiscard]] virtual bool commits(const Members& with, uint64_t call) = 0;
  // Makes `ranks` the next members unless the call was committed or others came first. By messages
  // that takes a moment: until then it is to be called again.
  virtual void propose(const Members& instead_of, uint64_t call, std::span<const int> ranks) = 0;

  // Posts a block for all members of an epoch; mail() returns a member's, or nothing if it is yet
  // to come. Rounds count from 0; a block stays until its rank posts that of two rounds later.
  virtual void post(uint64_t epoch, uint64_t round, std::span<const std::byte> block) = 0;
  [[nodiscard]] virtual std::optional<Bytes> mail(int rank, uint64_t epoch, uint64_t round)
      const = 0;

  // --- joining again ---
  // Tells a new process how it reaches the members.
  virtual void invite(Invitation& invitation) const = 0;
  // Makes this rank, which joins again, the next life of its place after that in `members`.
  virtual void be_next(const Members& members) = 0;
  // Tells the members that this rank wants to be taken in, or no longer does.
  virtual void ask(bool is_asking) = 0;
  // After ask(true): no rank hears this one, as another process has its place.
  [[nodiscard]] virtual bool is_turned_away() const = 0;
  // The next life of a lost rank asks to be taken in, and its process lives.
  [[nodiscard]] virtual bool asks(int rank) const = 0;
};

}  // namespace weft
