// SPDX-License-Identifier: Apache-2.0
// Peers' lives, as far as this rank knows: who said farewell, whose process ended, which operations
// failed. Any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/clock.hpp"
#include "group/process_watch.hpp"
#include "transport/transport.hpp"
#include "weft/group.hpp"

namespace weft::ofi {

class Peers {
 public:
  Peers(int num_ranks, uint32_t num_queues)
      : num_queues_(num_queues), peers_(static_cast<size_t>(num_ranks)) {}

  // Set-up: watches for the end of the rank's process, if that can be seen here.
  void watch(int rank, int32_t pid);
  // Set-up: the rank is of this process and ends with it.
  void set_same_process(int rank) { at(rank).is_watched = true; }  // an empty watch is always alive

  // Set-up: the rank is none of those that are joined.
  void set_absent(int rank) { at(rank).num_farewells.store(num_queues_); }

  // Counts a farewell, one for each queue; pairs with has_left().
  void on_left(int rank) { at(rank).num_farewells.fetch_add(1, std::memory_order_release); }
  void on_failure(int rank, const char* call, int error, std::string_view provider);

  // The rank is gone without a farewell.
  void on_lost(int rank) { at(rank).is_lost.store(true, std::memory_order_release); }

  // Notes that the fabric takes nothing for this rank, and returns for how long; 0 if it never did,
  // as a first connection may take its time. note_answered() notes that it does.
  [[nodiscard]] std::chrono::nanoseconds note_unanswered(int rank);
  void note_answered(int rank);

  [[nodiscard]] bool has_left(int rank) const {
    return at(rank).num_farewells.load(std::memory_order_acquire) >= num_queues_;
  }
  // The rank's process is known to have ended.
  [[nodiscard]] bool has_died(int rank) const {
    return at(rank).is_lost.load(std::memory_order_acquire) || !at(rank).watch.is_alive();
  }
  [[nodiscard]] bool is_gone(int rank) const { return has_left(rank) || has_died(rank); }
  // Only messages to the rank can tell whether it lives.
  [[nodiscard]] bool needs_ping(int rank) const {
    return !at(rank).is_watched && !at(rank).is_lost.load(std::memory_order_relaxed);
  }
  // An operation to the rank failed, perhaps because it is about to be gone.
  [[nodiscard]] bool has_failed(int rank) const {
    return at(rank).has_failed.load(std::memory_order_acquire);
  }
  // Returns what failed, once it is clear that the rank is not simply gone; empty if nothing did.
  [[nodiscard]] std::optional<std::string> failure(int rank) const;
  // Returns such a failure of any rank; cheap while nothing has failed.
  [[nodiscard]] std::optional<std::string> any_failure() const;

 private:
  struct Peer {
    ProcessWatch watch;
    bool is_watched = false;
    std::atomic<uint32_t> num_farewells = 0;
    std::atomic<bool> is_lost = false;  // no process can be watched, but its end is gone
    std::atomic<bool> has_failed = false;
    std::atomic<bool> has_answered = false;
    std::atomic<Clock::rep> unanswered_since = 0;  // 0: it answers
    // Under mutex_:
    std::string what;  // failed first
    Clock::time_point when;
  };
  [[nodiscard]] const Peer& at(int rank) const { return peers_[static_cast<size_t>(rank)]; }
  [[nodiscard]] Peer& at(int rank) { return peers_[static_cast<size_t>(rank)]; }

  uint32_t num_queues_;
  mutable std::mutex mutex_;
  std::atomic<bool> has_any_failure_ = false;
  std::vector<Peer> peers_;
};

}  // namespace weft::ofi
