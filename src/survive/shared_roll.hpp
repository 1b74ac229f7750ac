// SPDX-License-Identifier: Apache-2.0
// A roll in memory that all ranks of a host map, and that a death leaves as it is.
//
// One word decides: (epoch, who proposed it, the last call that is committed), changed by
// compare-and-swap only. The members of an epoch are what its proposer left in its line before.
//
//   arrive    My line says so. A rank that sees that all members' lines do swaps (e, p, n - 1)
//             for (e, p, n).
//   propose   A member is gone before it arrived: (e, p, n - 1) becomes (e + 1, me, n - 1). Now
//             no rank can commit n with the lost one, and none has.
//
// Lives that follow each other in a place have lines of their own, so that a life that was given up
// and goes on changes nothing that the next one says, and sees that it is no member. The life after
// the next takes over its line, and it writes nothing there any more. Of processes that want the
// same life one takes the line, by compare-and-swap; another can once that one has ended or left
// before it was a member. tests/model/roll.pml is the model of all this but the taking of lines.
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
#include "survive/roll.hpp"
#include "survive/roll_state.hpp"
#include "transport/mapped/memory.hpp"
#include "transport/mapped/signal_block.hpp"
#include "weft/group.hpp"

namespace weft {

class SharedRoll final : public Roll {
 public:
  // Collective. Throws the same Error on every rank if any cannot reach the memory. Not collective
  // for a rank that joins again (Group::rejoin): it is none of the members until they take it in.
  SharedRoll(std::unique_ptr<MemorySource> source, const Group& group);
  ~SharedRoll() override { leave(); }
  SharedRoll(const SharedRoll&) = delete;
  SharedRoll& operator=(const SharedRoll&) = delete;

  [[nodiscard]] uint64_t epoch() const override;
  void beat() override { Word(own_line().beats).fetch_add(1, std::memory_order_relaxed); }
  [[nodiscard]] uint64_t beats(int rank) const override;
  [[nodiscard]] bool has_ended(int rank) const override;
  [[nodiscard]] bool has_left(int rank) const override;
  [[nodiscard]] uint32_t doorbell() const override { return bell_.doorbell(); }
  void sleep(uint32_t seen, std::chrono::nanoseconds at_most) override {
    bell_.sleep(seen, at_most);
  }

  [[nodiscard]] Members members() const override;
  [[nodiscard]] bool is_in(const Members& members) const override;
  void follow(const Members& members) override;
  [[nodiscard]] uint64_t committed() const override;
  void leave() override;
  void arrive(const Members& with, uint64_t call) override;
  [[nodiscard]] bool has_arrived(int rank, const Members& with, uint64_t call) const override;
  [[nodiscard]] bool commits(const Members& with, uint64_t call) override;
  void propose(const Members& instead_of, uint64_t call, std::span<const int> ranks) override;
  void post(uint64_t epoch, uint64_t round, std::span<const std::byte> block) override;
  [[nodiscard]] std::optional<Bytes> mail(int rank, uint64_t epoch, uint64_t round) const override;

  // Invites by this rank's own mapping of the memory, as long as its process lives.
  void invite(Invitation& invitation) const override { invitation.cookie = memory_.cookie; }
  void be_next(const Members& members) override {
    life_ = members.lives[static_cast<size_t>(rank_)] + 1;
  }
  void ask(bool is_asking) override;
  [[nodiscard]] bool is_turned_away() const override;
  [[nodiscard]] bool asks(int rank) const override;

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
    alignas(64) uint64_t holder;  // RollHolder; 0: the line was never taken
    uint64_t has_left;            // the holder that has left, 0: none
    uint64_t asks;                // the holder that asks, 0: none
    Mail mail[2];
    // Behind it: proposals [2][num_ranks], of each rank 2 * life + (1 if it is a member).
  };

  // All ranks see these accesses in one order: of two that arrive at once, one sees the other.
  [[nodiscard]] static uint64_t read(uint64_t& word) {
    return Word(word).load(std::memory_order_seq_cst);
  }
  static void write(uint64_t& word, uint64_t value) {
    Word(word).store(value, std::memory_order_seq_cst);
  }
  [[nodiscard]] static bool swap(uint64_t& word, uint64_t& seen, uint64_t next) {
    return Word(word).compare_exchange_strong(seen, next, std::memory_order_seq_cst);
  }
  // Returns the number of a line; the lives of a rank have its two lines in turn.
  [[nodiscard]] size_t seat(int rank, uint64_t life) const {
    return life % 2 * static_cast<size_t>(num_ranks_) + static_cast<size_t>(rank);
  }
  [[nodiscard]] Line& line(size_t seat) const;
  [[nodiscard]] Line& line(int rank) const {
    return line(seat(rank, lives_[static_cast<size_t>(rank)]));
  }
  [[nodiscard]] Line& own_line() const { return line(seat(rank_, life_)); }
  // This roll still has its line: no other has taken it, nor is this a forked process.
  [[nodiscard]] bool has_line() const;
  // Takes this life's line; false: another process has it.
  [[nodiscard]] bool take_line();
  // The holder has not left, and its process is not known to have ended.
  [[nodiscard]] static bool is_there(Line& line, uint64_t holder);
  // A process of this rank's life, or of a later one, has been a member.
  [[nodiscard]] bool is_past(const Members& members) const;
  [[nodiscard]] uint64_t* proposal(size_t seat, uint64_t epoch) const;
  [[nodiscard]] size_t line_bytes() const;

  Context context_;
  int rank_;
  int num_ranks_;
  uint64_t life_ = 0;            // of this rank
  uint64_t taken_ = 0;           // RollHolder of the line when this rank took it, 0: it has none
  std::vector<uint64_t> lives_;  // by rank
  std::unique_ptr<MemorySource> source_;
  Memory memory_;
  SignalBlock bell_;
  uint64_t* state_ = nullptr;
  std::byte* lines_ = nullptr;
  std::vector<ProcessWatch> watches_;  // by rank; those of threads of this process see nothing

  void map(const Cookie& cookie);
  void watch(int rank);
  void watch_all();
  [[nodiscard]] uint64_t num_bytes() const;
};

}  // namespace weft
