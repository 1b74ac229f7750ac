// SPDX-License-Identifier: Apache-2.0
// Where the time of one lane goes. Phases follow each other; starting one ends the one before.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "weft/plan.hpp"

namespace weft::moe {

enum class Phase : uint8_t {
  kDense,  // embedding, norms, output head, loss
  kRoute,
  kPlan,
  kDispatch,
  kExperts,
  kCombine,
  kReduce,     // gradients and new values of the parameters that every rank holds
  kOptimizer,  // AdamW
};

inline constexpr size_t kNumPhases = 8;
inline constexpr std::array<std::string_view, kNumPhases> kPhaseNames = {
    "dense", "route", "plan", "dispatch", "experts", "combine", "reduce", "optimizer"};

class PhaseTimer {
 public:
  using Clock = std::chrono::steady_clock;

  // Forgets what was measured; no phase begins.
  void reset() {
    seconds_ = {};
    is_running_ = false;
  }
  void start(Phase phase) {
    const auto now = Clock::now();
    end_phase(now);
    phase_ = phase;
    since_ = now;
    is_running_ = true;
  }
  // Ends the current phase; what follows counts for none.
  void pause() {
    end_phase(Clock::now());
    is_running_ = false;
  }
  // What someone else has measured.
  void add(Phase phase, double seconds) { seconds_[static_cast<size_t>(phase)] += seconds; }
  // Seconds by phase; only phases that have ended count.
  [[nodiscard]] const std::array<double, kNumPhases>& seconds() const { return seconds_; }

 private:
  void end_phase(Clock::time_point now) {
    if (is_running_) {
      add(phase_, std::chrono::duration<double>(now - since_).count());
    }
  }

  std::array<double, kNumPhases> seconds_ = {};
  Phase phase_ = Phase::kDense;
  bool is_running_ = false;
  Clock::time_point since_ = Clock::now();
};

// Rows that one kind of operation moved, for one rank.
struct Traffic {
  int64_t calls = 0;
  int64_t wire_bytes = 0;     // to other ranks in a dispatch, from them in a combine
  int64_t logical_bytes = 0;  // all rows, this rank's own included

  void count(const Plan& plan, int64_t row_bytes) {
    ++calls;
    wire_bytes += plan.wire_bytes(row_bytes);
    logical_bytes += plan.logical_bytes(row_bytes);
  }
};

}  // namespace weft::moe
