// SPDX-License-Identifier: Apache-2.0
// How ranks on GPUs go on without those that are lost (PeerLoss::kShrink). A thread sees that a
// rank is lost and ends the waits of this rank's kernels, whatever its host does; the host's next
// call agrees with the hosts of all that are left on which calls are to be made again. Nothing is
// repaired inside a call, as what is queued behind it may have read it already.
//
// Ranks that use several exchanges may come to different ones first, and would wait for each other
// in them. So while a thread waits here, the threads of its other watches answer for it where
// others have begun to agree; its next call finds what came out.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cuda/transport/peer_regions.hpp"
#include "survive/survival.hpp"

namespace weft {

class LossWatch {
 public:
  // Calls of a rank, by their numbers on the GPUs.
  struct Calls {
    uint64_t last = 0;        // that has ended, well or not
    uint64_t first_void = 0;  // that has to be made again, the one after the last if none
    // With PeerLoss::kRepeat: as in GateState, and the calls before the gate that holds.
    uint64_t passed = 0;
    uint64_t whole = 0;
    int32_t num_held = 0;
    int32_t can_repeat = 0;  // 1: these calls can be made again, if need be
  };
  // A wait of this rank's kernels that has come to its deadline.
  struct Late {
    ErrorCode cause;
    std::optional<int> rank;  // that has not begun the call
  };
  // The ranks that are left have agreed on this.
  struct Agreement {
    uint64_t last = 0;  // of all: calls go on after it
    // This rank's, as in CallReport.
    int64_t void_calls = 0;
    int64_t calls_behind = 0;
    bool is_repeated = false;  // all can make again what comes after
    uint64_t whole = 0;        // the last call that all have all of
  };
  // How calls are made again (PeerLoss::kRepeat), by the thread that watches; all or none are set.
  struct Repeats {
    // Keeps the calling thread from making calls. False: it is making one.
    std::function<bool()> try_lock;
    std::function<void()> unlock;
    std::function<std::optional<Late>()> late;
    // Once ranks are lost: goes on without them and makes calls again.
    std::function<void(const Agreement&)> make;
    // Makes calls void after all; the caller's next call hears of it.
    std::function<void()> release;
  };
  // Connects the members anew, by an all_gather among them.
  using Connect = std::function<void(const Group& members, const Meeting& who)>;
  // Functions that act on a rank's kernels, called at any time when other ranks need it.
  struct Kernels {
    // Ends their waits, and all that is queued behind them.
    std::function<void()> stop;
    // Returns the rank's calls after stop(), nothing while kernels still run. The rank makes no
    // call meanwhile.
    std::function<std::optional<Calls>()> calls;
    // Called like that of meet(), once ranks are lost and calls are agreed on; null: the others are
    // reached as before.
    Connect connect = {};
    Repeats repeats = {};
  };
  // Collective. Ranks whose `context.transport` is "peer" share memory of the host, others speak
  // by messages. A rank that joins again waits until the members take it in, and is one of them
  // after meet(); throws TimeoutError if they do not.
  LossWatch(
      const Group& group, const Context& context, std::chrono::milliseconds timeout, Kernels kernels
  );
  ~LossWatch();  // this rank leaves

  // Says, while it lives, that this thread waits for other ranks in the exchange of watch `where`
  // (may be null), so that the watches of its other exchanges answer for it.
  class Wait {
   public:
    explicit Wait(const LossWatch* where);
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    const LossWatch* where_;
    const LossWatch* before_ = nullptr;  // where it waited already
  };

  // --- any thread ---
  // Returns whether ranks are lost and the kernels stopped.
  [[nodiscard]] bool has_news() const { return has_news_.load(std::memory_order_acquire); }
  // Waits for has_news(), but not longer than `at_most`. Returns has_news().
  [[nodiscard]] bool await_news(std::chrono::milliseconds at_most) const;
  // Returns whether a rank has ended its exchange: a call that needs it will not end.
  [[nodiscard]] bool has_left() const { return has_left_.load(std::memory_order_relaxed); }
  [[nodiscard]] CallReport report() const;  // as this rank's last call was told
  // Returns whether the watch has agreed in this rank's place, or could not, as settle() will say.
  // Waits for an agreement under way.
  [[nodiscard]] bool has_answered() const {
    const std::lock_guard lock(mutex_);
    return answered_ || answer_error_ || is_no_loss_ || are_void_;
  }
  // Makes others stop waiting for this rank.
  void leave();
  // See Exchange::mask().
  void mask(std::span<const int> ranks);

  // --- the thread that calls, once this rank's kernels have ended ---
  // Makes this thread the calling one.
  void follow_caller() { caller_.store(std::this_thread::get_id(), std::memory_order_relaxed); }
  // Waits until the ranks agree who is left. `late`: a rank that has not begun the call within the
  // deadline, and is given up unless it is a thread of this process. Returns nothing if no rank is
  // lost. Throws PeerError if this rank is lost, TimeoutError if others have not come.
  [[nodiscard]] std::optional<Agreement> settle(
      std::string_view op, ErrorCode cause, const Calls& own, std::optional<int> late = std::nullopt
  );
  // Waits until all members are here with their calls ended. If ranks are lost, agrees as settle()
  // does, also with members that are in a call.
  [[nodiscard]] std::optional<Agreement> assemble(std::string_view op, const Calls& own);
  // Returns a bit for each rank, of at most 32, that is lost by report().
  [[nodiscard]] uint32_t lost() const;
  // `transport` is the exchange's, as Survival has it.
  [[nodiscard]] std::string invitation(std::string_view transport) const {
    return survival_.invitation(transport);
  }
  [[nodiscard]] bool has_ended(int rank) const;
  // Waits until new processes in the places of lost `ranks` are members, then connects all members.
  // Returns which of `ranks` did not ask in time. Throws what `connect` does; then this rank has
  // left.
  [[nodiscard]] std::vector<int> readmit(std::span<const int> ranks, const Connect& connect);
  // Check before and after readmit(), as Survival does.
  void check_lost(std::span<const int> ranks) const;
  void check_back(std::span<const int> ranks, std::span<const int> missing) const;
  // Connects a rank that joins again with the members. `connect` is called on all members, once
  // more with those that are left if ranks are lost meanwhile; in an all_gather of its group this
  // rank's block stands for those of lost ranks.
  void meet(const Connect& connect);
  // Lets the kernels be stopped again.
  void resume();
  // Tells `on_loss`, then throws Error (kRanksLost) of `op`, in which the ranks of `now` were lost.
  [[noreturn]] void raise(
      std::string_view op,
      const CallReport& now,
      const std::function<void(const CallReport&)>& on_loss
  ) const;

 private:
  void run();
  void look();
  // Agrees with the others in place of the thread that calls.
  void answer();
  // Return this rank's calls since answered_, and add a later agreement to that answer.
  [[nodiscard]] Calls calls_since_answer() const;
  void add_to_answer(const Agreement& agreement);
  // Agrees with the members who is lost, after a call that `late` was no part of or that failed
  // because of `cause`. Returns whether any rank is lost.
  [[nodiscard]] bool settle_members(std::string_view op, ErrorCode cause, std::optional<int> late);
  // Agrees on the calls with the members that are left.
  [[nodiscard]] Agreement agree_on_calls(std::string_view op, const Calls& own);
  void meet_at_last(std::string_view op, const Connect& connect);
  // Records for report() who the members are.
  void tell();

  Context context_;
  std::chrono::milliseconds timeout_;
  Kernels kernels_;
  mutable std::mutex mutex_;  // guards what follows up to the next mark; held while a thread waits
  Survival survival_;
  Survival::Vigil vigil_;
  std::optional<std::chrono::steady_clock::time_point> seen_to_leave_;
  std::optional<Agreement> answered_;  // that the next call has still to hear
  uint64_t answered_last_ = 0;         // Calls::last when that began
  std::exception_ptr answer_error_;    // likewise
  bool is_no_loss_ = false;            // likewise: a wait was in vain, and no rank is lost
  // Some ranks cannot make their calls again. What is queued comes to nothing, and then it is
  // agreed how many calls these were.
  bool are_void_ = false;
  // ---
  mutable std::mutex told_mutex_;
  CallReport told_;  // by told_mutex_
  std::atomic<std::thread::id> caller_ = std::this_thread::get_id();
  std::atomic<bool> has_news_ = false;
  std::atomic<bool> has_left_ = false;
  std::atomic<bool> is_ended_ = false;
  std::thread thread_;
};

// Waits until kernels that were stopped have ended. Throws TimeoutError after twice the deadline of
// a wait.
void await_stopped(
    const Context& context,
    std::chrono::milliseconds timeout,
    const std::function<bool()>& have_ended
);

}  // namespace weft
