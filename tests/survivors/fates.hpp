// SPDX-License-Identifier: Apache-2.0
// What a storm has in store for its ranks, by its seed.
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

// What becomes of a rank.
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
  // By return, then rank: of a process that came with that return, with 0 at first.
  std::vector<std::vector<Fate>> fates;
  int last = 0;  // the rank that is left
  std::chrono::seconds bound = std::chrono::seconds(120);
};

[[nodiscard]] Storm make_storm(uint64_t seed, const StormLimits& limits);

// Of the round that has ended: whether all that are lost are called back now. The same on all
// ranks.
[[nodiscard]] bool calls_back(const Storm& storm, uint64_t round);

}  // namespace weft::test
