// SPDX-License-Identifier: Apache-2.0
// Ranks that are lost at random, each in its own way, until one is left, and called back some times
// in some storms; every call of those that are left is compared with the reference.
#pragma once

#include <chrono>
#include <cstdint>

namespace weft::test {

struct StormCount {
  int64_t killed = 0;
  int64_t stopped = 0;  // given up at the deadline, and continued after that
  int64_t left = 0;
  int64_t masked = 0;
  int64_t returned = 0;  // processes that have taken a lost rank's place
  int64_t wrong = 0;  // ranks with another result than the reference, or an error that nobody made
  int64_t hung = 0;   // ranks that were in one step for longer than a bound

  [[nodiscard]] int64_t lost() const { return killed + stopped + left + masked; }
  StormCount& operator+=(const StormCount& other);
};

struct StormLimits {
  // How long a stopped rank is waited for. A rank that gets no processor for so long is blamed.
  std::chrono::milliseconds deadline = std::chrono::seconds(10);
  double stops = 0.1;    // share of storms with ranks that are stopped
  double returns = 0.5;  // share of the others in which lost ranks are called back
  // Ranks are in several domains and agree by messages: nobody is stopped or masked.
  bool has_domains = false;
};

// One storm among processes, its ranks, its calls and its events by the seed. What goes wrong is
// told on stderr, with the seed. Call before starting threads.
[[nodiscard]] StormCount run_storm(uint64_t seed, const StormLimits& limits = {});
// Storms of seeds from 1 on, until so many ranks were lost or anything was wrong or hung.
[[nodiscard]] StormCount run_storms(int64_t num_lost, const StormLimits& limits);

}  // namespace weft::test
