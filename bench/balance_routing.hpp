// SPDX-License-Identifier: Apache-2.0
// Made-up and recorded routing of several evenness, as counts, for the benchmarks of balancing.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace weft::bench {

inline constexpr int kBalanceTopk = 8;

struct BalanceShape {
  int ranks;
  int experts;
  int64_t tokens;  // of each rank
  uint64_t seed;
};

using RouteCounts = std::vector<int32_t>;  // [ranks, experts]

struct NamedRouting {
  std::string name;
  // Empty where there is none of so many experts; a recorded routing sets the number of tokens.
  std::function<RouteCounts(BalanceShape&)> counts;
};

// `path`: a routing file whose last step is one of them, or empty.
[[nodiscard]] std::vector<NamedRouting> balance_routings(const std::string& path);

// Returns rows as a multiple of those of a mean rank.
[[nodiscard]] double of_mean(const BalanceShape& shape, int64_t rows);
// Returns of_mean() the rows of the busiest rank without replicas.
[[nodiscard]] double imbalance(const BalanceShape& shape, const RouteCounts& counts);

}  // namespace weft::bench
