// SPDX-License-Identifier: Apache-2.0
// What the ranks of a host know of each other's life, in memory that all of them map and that a
// death leaves as it is. By it they agree on who is a member, and at the end of each call that all
// members have what they need, without any rank that the others would depend on.
//
// One word decides: (epoch, who proposed it, the last call that is committed), changed by
// compare-and-swap only. The members of an epoch are what its proposer left in its line before.
//
//   arrive    I have all that I need of call n, and have given all that others need: my line says
//             so. Whoever sees that the lines of all members say so swaps (e, p, n - 1) for
//             (e, p, n), and the call may return on all.
//   propose   a member is gone before it arrived: (e, p, n - 1) becomes (e + 1, me, n - 1). Now
//             nobody can commit n with the lost one, and nobody has.
//
// A place among the ranks is taken by one life after the other: by the process that began there,
// then by those that join again. Which life a place is at is agreed on with the members. Lives that
// follow each other have lines of their own, so that one that was given up and goes on changes
// nothing that the next one says, and sees that it is none of the members. The next but one has its
// line, and it writes nothing there any more.
//
// So a call ends with the same members on all ranks, whoever dies meanwhile. tests/model/roll.pml
// is the model of it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "group/process_watch.hpp"
#include "transport/mapped/memory.hpp"
#include "transport/mapped/signal_block.hpp"
#include "weft/group.hpp"

namespace weft {

class Roll {
 public:
  // Longest block of post().
  static constexpr size_t kMailBytes = 4096;

  // Who goes on together.
  struct Members {
    uint64_t epoch = 0;
    std::vector<int> ranks;       // ascending
    std::vector<uint64_t> lives;  // by rank, of all: the last that has been a member

    [[nodiscard]] bool has(int rank) const;
    // Those of them that are not among `others` in the same life.
    [[nodiscard]] std::vector<int> beside(const Members& others) const;
  };

  // Collective. Throws the same Error on every rank if any cannot reach the memory. Not collective
  // for a rank that joins again (Group::rejoin): it is none of the members until they take it in.
  Roll(MemorySource& source, const Group& group);
  // By which others reach the memory while this process lives.
  [[nodiscard]] const Cookie& cookie() const { return memory_.cookie; }

  // --- any thread ---
  [[nodiscard]] uint64_t epoch() const;
  // A moment's work of this rank, by which others see that it is not stopped.
  void beat() const { Word(own_line().beats).fetch_add(1, std::memory_order_relaxed); }
  [[nodiscard]] uint64_t beats(int rank) const;
  // Its process has ended, or it has left.
  [[nodiscard]] bool has_ended(int rank) const;
  [[nodiscard]] bool has_left(int rank) const;
  [[nodiscard]] uint32_t doorbell() const { return bell_.doorbell(); }
  void sleep(uint32_t seen, std::chrono::nanoseconds at_most) { bell_.sleep(seen, at_most); }

  // --- this rank's thread ---
  [[nodiscard]] Members members() const;
  // This rank is one of them: by this life of its place.
  [[nodiscard]] bool is_in(const Members& members) const;
  // What is asked of a rank is asked of its life among these from now on.
  void follow(const Members& members);
  // The last call that was committed.
  [[nodiscard]] uint64_t committed() const;
  // This rank joins again, as the next life of its place; none of the members has that yet.
  void be_next(const Members& members) { life_ = members.lives[static_cast<size_t>(rank_)] + 1; }
  // It wants to be taken in, or does no longer.
  void ask(bool is_asking);
  // The next life of a lost rank does, by a process that lives.
  [[nodiscard]] bool asks(int rank) const;
  void leave();
  // This rank has all that it needs of the call. Calls are numbered from 1.
  void arrive(const Members& with, uint64_t call);
  [[nodiscard]] bool has_arrived(int rank, const Members& with, uint64_t call) const;
  // Whether the call is over for all members, which it is as soon as all have arrived.
  [[nodiscard]] bool commits(const Members& with, uint64_t call);
  // Makes `ranks` the next members unless the call was committed or others came first.
  void propose(const Members& instead_of, uint64_t call, std::span<const int> ranks);

  // A block for all members of an epoch, and a member's; nothing: it is not there yet. Rounds count
  // from 0; a block stays until its rank posts the round but one.
  void post(uint64_t epoch, uint64_t round, std::span<const std::byte> block);
  [[nodiscard]] std::optional<Bytes> mail(int rank, uint64_t epoch, uint64_t round) const;

 private:
  using Word = std::atomic_ref<uint64_t>;
  static_assert(Word::is_always_lock_free);

  struct Mail {
    uint64_t number;  // of epoch and round; 0: being written
    uint64_t bytes;
    uint64_t words[kMailBytes / sizeof(uint64_t)];
  };
  struct Line {
    alignas(64) uint64_t arrived;
    alignas(64) uint64_t beats;
    alignas(64) uint64_t has_left;  // 1 + the life that has
    uint64_t pid;
    uint64_t asks;  // likewise
    Mail mail[2];
    // Behind it: proposals [2][num_ranks], of each rank 2 * life + (1 if it is a member).
  };

  // All in one order for all ranks: of two that arrive at the same time, one sees the other.
  [[nodiscard]] static uint64_t read(uint64_t& word) {
    return Word(word).load(std::memory_order_seq_cst);
  }
  static void write(uint64_t& word, uint64_t value) {
    Word(word).store(value, std::memory_order_seq_cst);
  }
  [[nodiscard]] static bool swap(uint64_t& word, uint64_t& seen, uint64_t next) {
    return Word(word).compare_exchange_strong(seen, next, std::memory_order_seq_cst);
  }
  // Lines in turn for the lives of a rank.
  [[nodiscard]] size_t seat(int rank, uint64_t life) const {
    return life % 2 * static_cast<size_t>(num_ranks_) + static_cast<size_t>(rank);
  }
  [[nodiscard]] Line& line(size_t seat) const;
  [[nodiscard]] Line& line(int rank) const {
    return line(seat(rank, lives_[static_cast<size_t>(rank)]));
  }
  [[nodiscard]] Line& own_line() const { return line(seat(rank_, life_)); }
  // It is this process's still: neither the next life but one has it, nor was this one forked.
  [[nodiscard]] bool has_line() const;
  [[nodiscard]] uint64_t* proposal(size_t seat, uint64_t epoch) const;
  [[nodiscard]] size_t line_bytes() const;

  int rank_;
  int num_ranks_;
  uint64_t life_ = 0;            // of this rank
  std::vector<uint64_t> lives_;  // by rank
  Memory memory_;
  SignalBlock bell_;
  uint64_t* state_ = nullptr;
  std::byte* lines_ = nullptr;
  // By rank; null: its process had ended before this rank looked. Those of threads of this process
  // see nothing.
  std::vector<std::unique_ptr<ProcessWatch>> watches_;

  void map(MemorySource& source, const Cookie& cookie);
  void watch(int rank);
  [[nodiscard]] uint64_t num_bytes() const;
};

}  // namespace weft
