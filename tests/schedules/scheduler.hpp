// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of which one runs at a time. A seed decides who runs next, when each put arrives
// and what goes wrong; time is a number that the scheduler counts. The same seed gives the same
// run.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <semaphore>
#include <string>
#include <vector>

#include "plan/random_routing.hpp"
#include "transport/transport.hpp"

namespace weft::test {

// Fault of one rank in a run, beside the order of things.
struct Misfortune {
  int victim = -1;                    // -1: nothing
  int64_t at_step = 0;                // of the victim's puts, raises and waits
  bool dies = false;                  // then and there
  bool loses_put = false;             // the next one
  std::chrono::milliseconds stop{0};  // it stands still for so long
};

// A defect on purpose, which runs must find.
enum class Planted : uint8_t {
  kNothing,
  kSignalFirst,  // a put's signal grows before its bytes are there
  kOneEarly,     // a signal looks as if it had grown once more
};

// Thrown where a rank dies. No exception of std, so that nobody takes it for an error.
struct Killed {};

class Scheduler {
 public:
  Scheduler(uint64_t seed, int num_ranks, const Misfortune& misfortune, Planted planted);

  // --- a rank's thread ---
  void enter(int rank);  // waits for its turn; only then it may use its transport
  void leave(int rank);  // it has ended
  void await_end();      // of all ranks
  // The rank takes a step in which others may run before. Throws Killed.
  void step(int rank);
  // It waits until its doorbell differs from `seen`, for so long at most. Throws Killed.
  void park(int rank, uint32_t seen, std::chrono::nanoseconds at_most);

  // --- its transport ---
  [[nodiscard]] std::unique_ptr<Transport> wrap(std::unique_ptr<Transport> inner, int rank);
  [[nodiscard]] Clock::time_point now() const { return Clock::time_point(time_); }
  [[nodiscard]] bool is_dead(int rank) const { return ranks_[static_cast<size_t>(rank)].is_dead; }
  [[nodiscard]] Planted planted() const { return planted_; }
  // It arrives in a while, or never.
  void send(int from, int to, const Put& put, uint64_t raise_amount);
  // All that the rank has sent arrives now.
  void flush(int rank);

  // Returns what happened that must not happen in any run; empty if nothing.
  [[nodiscard]] const std::string& failure() const { return failure_; }
  // Returns a hash of all decisions, in order.
  [[nodiscard]] uint64_t trace() const { return trace_; }
  [[nodiscard]] std::chrono::nanoseconds time() const { return time_; }
  // Returns whether the misfortune has come about.
  [[nodiscard]] bool has_struck() const { return has_struck_; }

 private:
  struct Rank {
    std::binary_semaphore turn{0};
    Transport* inner = nullptr;
    bool has_entered = false;
    bool has_ended = false;
    bool is_dead = false;
    bool is_parked = false;
    uint32_t seen = 0;                   // parked: until the doorbell differs
    std::chrono::nanoseconds wake{0};    // or until then
    std::chrono::nanoseconds resume{0};  // it is stopped until then
    int64_t num_steps = 0;
  };
  struct Sent {
    int from = 0;
    int to = 0;
    Put put;
    uint64_t raise_amount = 0;  // 0: a put
    std::vector<std::byte> bytes = {};
    std::chrono::nanoseconds due{0};
    bool has_raised = false;  // Planted::kSignalFirst
  };

  uint64_t choose(uint64_t bound);
  [[nodiscard]] bool is_ready(const Rank& rank) const;
  void strike(int rank);
  void arrive(size_t index);
  // The next rank that runs; -1: all have ended.
  int next();
  void hand_on(int from);

  std::vector<Rank> ranks_;
  Misfortune misfortune_;
  Planted planted_;
  RandomSource random_;
  std::chrono::nanoseconds longest_hold_{0};
  std::vector<Sent> sent_;
  std::chrono::nanoseconds time_{0};
  uint64_t trace_ = 14695981039346656037U;  // FNV-1a
  int num_entered_ = 0;
  std::mutex entering_;
  std::binary_semaphore end_{0};
  bool has_struck_ = false;
  bool loses_next_ = false;
  std::string failure_;
};

}  // namespace weft::test
