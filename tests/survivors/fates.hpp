// SPDX-License-Identifier: Apache-2.0
// Fates of the ranks of a storm, by its seed.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "support/exchange_case.hpp"
#include "survivors/storm.hpp"

namespace weft::test {

inline constexpr int kMostRanks = 8;

enum class End : uint8_t { kNone, kKilled, kStopped, kLeft, kMasked };
enum class When : uint8_t { kTime, kStep, kLoss };

// End that a rank comes to, and when.
struct Fate {
  End end = End::kNone;
  When when = When::kTime;
  std::chrono::microseconds time = {};
  int step = 0;    // call, from 0
  int masker = 0;  // with kMasked: who gives it up
};

struct Storm {
  uint64_t seed = 0;
  ExchangeSetup setup;
  Case spec;
  int num_returns = 0;  // how often those that are lost are called back
  // Fates by return, then rank, of the processes that come with that return; 0: at first.
  std::vector<std::vector<Fate>> fates;
  int last = 0;  // the rank that is left
  std::chrono::seconds bound = std::chrono::seconds(120);
};

[[nodiscard]] Storm make_storm(uint64_t seed, const StormLimits& limits);

// Returns whether all that are lost are called back now, after `round`; the same on every rank.
[[nodiscard]] bool calls_back(const Storm& storm, uint64_t round);

}  // namespace weft::test
