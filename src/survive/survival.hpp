// SPDX-License-Identifier: Apache-2.0
// How the ranks of an exchange go on without those that are lost (PeerLoss::kShrink): a call that
// was cut short is made again by the members that are left, with memory and signals that no lost
// rank knows, so that nothing it may still write is ever taken for new. CpuExchange::run_attempts
// is where that happens. On GPUs no call is made again by itself (cuda/exchange/loss_watch.hpp).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "survive/roll.hpp"
#include "weft/exchange.hpp"

namespace weft {

class Survival {
 public:
  // Collective. Throws the same Error on every rank if ranks of several domains cannot connect. A
  // rank that joins again waits until the members take it in; throws TimeoutError if they do not.
  Survival(const Group& group, const Context& context, std::chrono::milliseconds timeout);

  // --- any thread, while a call waits ---
  // Tells the others that this rank is not stopped. Throws PeerError if the members have changed.
  void look() const;
  // One thread's wait, and since when it has seen no beat of each rank.
  struct Vigil {
    std::chrono::steady_clock::time_point begin;
    std::vector<uint64_t> looks;                                      // beats, by rank
    std::vector<std::chrono::steady_clock::time_point> silent_since;  // by rank
  };
  [[nodiscard]] Vigil begin_wait() const;
  // Trouble with the members that this rank knows; kLost: one has ended without leaving, or others
  // are members by now.
  enum class Trouble : uint8_t { kNone, kLeft, kLost };
  [[nodiscard]] Trouble trouble() const;
  // Others are members by now, so that a member waits for this rank.
  [[nodiscard]] bool has_moved() const { return roll_->epoch() != members_.epoch; }
  // Ends another thread's wait here by an Error (kInterrupted).
  void stop() { is_stopped_.store(true, std::memory_order_relaxed); }
  void beat() const { roll_->beat(); }
  // The last process in the rank's place has ended or left.
  [[nodiscard]] bool has_ended(int rank) const { return roll_->has_ended(rank); }
  // True if a wait has to end: a member whose arrival is missing has not looked for the timeout,
  // and is given up for that, or twice the timeout has passed although all look. Ask it often.
  [[nodiscard]] bool is_over(Vigil& wait);

  // --- this rank's thread ---
  [[nodiscard]] const std::vector<int>& members() const { return members_.ranks; }
  [[nodiscard]] bool is_lost(int rank) const { return !members_.has(rank); }
  // The ranks are processes, not threads of one.
  [[nodiscard]] bool are_processes() const { return !group_.topology().one_process; }
  [[nodiscard]] uint64_t epoch() const { return members_.epoch; }
  // Since the last takes_strays(), members were lost that had not ended: they may still write where
  // they could.
  [[nodiscard]] bool takes_strays() { return std::exchange(has_strays_, false); }
  // Since the last takes_newcomers(), ranks have joined again, perhaps this one.
  [[nodiscard]] bool takes_newcomers() { return std::exchange(has_newcomers_, false); }

  // Begins a call, or a change of the members that all take part in as in a call. is_second_part:
  // ranks lost in the call before count for this one, too.
  void begin_call(bool is_second_part = false);
  // Tells that this rank has all it needs of the call. True once that holds for all members; false
  // if the members have changed and the call has to be made again. Throws TimeoutError.
  [[nodiscard]] bool finish_call(std::string_view op);
  // After a call failed: waits a moment for a loss of ranks to be seen. True if others are members
  // now. Throws PeerError if it was this rank that was lost.
  [[nodiscard]] bool settle(std::string_view op, ErrorCode cause);
  // Leaves `ranks` out at the next call. Throws Error (kUnsupported) for a thread of this process,
  // whose stores nothing keeps away, unless it has left.
  void give_up(std::span<const int> ranks);
  // Returns the ranks that were lost in the last call.
  [[nodiscard]] std::vector<int> lost_in_call() const { return before_.beside(members_); }
  // After begin_call(): waits until these ask to be taken in and are, or a member has waited for
  // the timeout. Either holds on all members when the call is finished. Returns who is missing.
  [[nodiscard]] std::vector<int> readmit(std::span<const int> ranks);
  // Throws Error (kInvalidArgument) unless all these are lost.
  void check_lost(std::span<const int> ranks) const;
  // For when readmit() has returned `missing` and the call is finished: throws TimeoutError if one
  // of `ranks` did not come, PeerError if it was lost again.
  void check_back(std::span<const int> ranks, std::span<const int> missing) const;
  // The rank has been taken in since begin_call(), even if it was lost again.
  [[nodiscard]] bool has_come(int rank) const;
  // Returns an invitation; by `transport` the exchange is made again.
  [[nodiscard]] std::string invitation(std::string_view transport) const;
  // Tells others not to wait for this rank any more.
  void leave() { roll_->leave(); }

  // Returns the members' control plane; the blocks of lost ranks are empty. Throws PeerError and
  // TimeoutError as calls do.
  [[nodiscard]] Group group();

 private:
  [[nodiscard]] std::vector<Bytes> all_gather(std::span<const std::byte> block);
  void join();
  [[nodiscard]] bool adopt(std::string_view op);
  // Beats for this rank while it waits; throws Error (kInterrupted) after stop().
  void live_on() const;
  // Proposes the members without those that are gone; false: none is. A rank that arrived at the
  // call before its end stays, as others may have returned from the call; `is_open`: none can have,
  // since this rank has not arrived and will not.
  [[nodiscard]] bool propose_without_gone(bool is_open);
  // True if what was proposed would have been decided by now.
  [[nodiscard]] bool is_undecided(const Vigil& wait) const;
  // Throws TimeoutError if is_undecided(), with the ranks that have said nothing `about` these.
  void check_decided(const Vigil& wait, std::string_view op, std::span<const int> about) const;

  Group group_;
  Context context_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<Roll> roll_;
  Roll::Members members_;
  uint64_t call_ = 0;
  uint64_t round_ = 0;    // of all_gather in this epoch
  Roll::Members before_;  // when the call began
  bool has_strays_ = false;
  bool has_newcomers_ = false;
  std::atomic<bool> is_stopped_ = false;
  std::mutex mutex_;
  std::vector<int> silent_;  // by mutex_; whom a wait of this attempt has given up
};

}  // namespace weft
