// SPDX-License-Identifier: Apache-2.0
// Where the time of a step goes. Phases follow each other; starting one ends the one before.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

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

  // Forgets what was measured and starts with `phase`.
  void restart(Phase phase) {
    seconds_ = {};
    phase_ = phase;
    since_ = Clock::now();
  }
  void start(Phase phase) {
    const auto now = Clock::now();
    seconds_[static_cast<size_t>(phase_)] += std::chrono::duration<double>(now - since_).count();
    phase_ = phase;
    since_ = now;
  }
  // By phase; ends the current one.
  [[nodiscard]] std::array<double, kNumPhases> stop() {
    start(phase_);
    return seconds_;
  }

 private:
  std::array<double, kNumPhases> seconds_ = {};
  Phase phase_ = Phase::kDense;
  Clock::time_point since_ = Clock::now();
};

}  // namespace weft::moe
