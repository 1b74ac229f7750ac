// SPDX-License-Identifier: Apache-2.0
// The one bounded wait of the CPU executor. It ends when the condition holds, the deadline passes,
// a peer that is waited for has died or left, or the user of a rank has interrupted this call
// (core/interrupt.hpp); the error names who waited for whom.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.hpp"
#include "plan/without.hpp"
#include "survive/survival.hpp"
#include "transport/transport.hpp"

namespace weft {

// A signal of this rank that must reach a number, and the peer whose bytes it stands for.
struct Missing {
  int peer = 0;
  uint32_t signal = 0;
  uint64_t seen = 0;
  uint64_t wanted = 0;
  int via = -1;  // the rank that hands them on and raises the signal; -1: `peer` does
};

struct WaitReason {
  std::string_view op;    // "dispatch"
  uint64_t call = 0;      // number of the call on this exchange
  std::string_view what;  // "rows"
};

// Ranks that take part, and what this rank does now and then while it waits for them.
struct Company {
  Survival* survival = nullptr;  // who says when a wait is over; null: the deadline
  IsLost is_lost = none_is_lost;
  std::function<void()> look = {};  // what it throws ends the wait
};

class Waiter {
 public:
  // `first_notice`: the signal by which rank 0 says in which call it was interrupted; those of the
  // others follow.
  Waiter(
      Transport& transport,
      const Context& context,
      std::chrono::milliseconds timeout,
      uint32_t first_notice,
      Company company = {}
  );
  // Waits for signals of another transport, and of other numbers, from now on.
  void follow(Transport& transport, uint32_t first_notice) {
    transport_ = &transport;
    first_notice_ = first_notice;
  }

  // Waits; any thread. `ready` is polled, `missing` asked only while asleep. Throws TimeoutError,
  // PeerError or Error (kInterrupted). `is_stopping` ends the wait quietly when another worker of
  // this rank has failed.
  void until(
      const WaitReason& reason,
      const std::function<bool()>& ready,
      const std::function<std::vector<Missing>()>& missing,
      const std::function<bool()>& is_stopping = {}
  );
  // Waits until each listed signal has reached its number.
  void until_raised(const WaitReason& reason, const std::vector<Missing>& wanted);

  // Throws PeerError if another rank has been interrupted in this call or before it.
  void check_interrupts(const WaitReason& reason) const;

  // Tells how a peer ended: "rank 1 died", or "rank 2 died and rank 1 left the exchange", since a
  // rank may leave because another died. Without a peer (-1), or while it lives: which rank died.
  // Empty: nothing of it is seen within `patience`.
  [[nodiscard]] std::string end_of(int peer, std::chrono::milliseconds patience = {}) const;

  // [num_ranks] seconds, any thread.
  [[nodiscard]] std::vector<double> wait_seconds() const;

 private:
  // Rank whose end leaves a signal unraised, and how it ended.
  struct Gone {
    const Missing* missing = nullptr;
    int rank = 0;
    PeerState how = PeerState::kAlive;
  };
  [[nodiscard]] Gone find_gone(const Missing& one) const;
  void check_peers(
      const WaitReason& reason,
      const std::vector<Missing>& missing,
      const std::function<bool()>& ready
  );
  [[noreturn]] void give_up(const WaitReason& reason, const std::vector<Missing>& missing) const;

  Transport* transport_;
  Context context_;
  std::chrono::milliseconds timeout_;
  uint32_t first_notice_;
  Company company_;
  std::vector<std::atomic<int64_t>> wait_ns_;
};

}  // namespace weft
