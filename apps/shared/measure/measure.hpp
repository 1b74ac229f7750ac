// SPDX-License-Identifier: Apache-2.0
// Time and what samples of it say.
#pragma once

#include <chrono>
#include <span>
#include <vector>

#include "core/clock.hpp"
#include "group/control_plane.hpp"
#include "weft/group.hpp"

namespace weft::program {

class Stopwatch {
 public:
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(Clock::now() - start_).count();
  }
  [[nodiscard]] double microseconds() const { return seconds() * 1e6; }

 private:
  Clock::time_point start_ = Clock::now();
};

// The smallest sample that at least `percent` of all samples do not exceed; 0 without samples.
[[nodiscard]] double percentile(std::span<const double> samples, double percent);

// Collective: what every rank has, by rank.
template <class T>
[[nodiscard]] std::vector<T> gather(const Group& group, const T& mine) {
  std::vector<T> all;
  for (const Bytes& block : group.all_gather(std::as_bytes(std::span(&mine, 1)))) {
    all.push_back(block_value<T>(block, all.size(), {group.rank(), group.num_ranks()}));
  }
  return all;
}

// Collective: of each sample the slowest rank's.
[[nodiscard]] std::vector<double> slowest_of(const Group& group, std::span<const double> mine);

// Cores this process may run on.
[[nodiscard]] int num_usable_cores();

}  // namespace weft::program
