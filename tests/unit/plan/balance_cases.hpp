// SPDX-License-Identifier: Apache-2.0
// Random routing of a few ranks, with what a planner is asked to make of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "plan/balance/balance.hpp"
#include "plan/build.hpp"
#include "plan/random_routing.hpp"

namespace weft {

struct BalanceCase {
  int num_ranks = 0;
  int num_experts = 0;
  std::vector<RouteTable> routes;  // by rank
  std::vector<int32_t> counts;     // [num_ranks, num_experts]
  BalanceOptions options;

  [[nodiscard]] int32_t count(int source, int expert) const {
    return counts[static_cast<size_t>(source * num_experts + expert)];
  }
  [[nodiscard]] Balance plan() const { return plan_balance(counts, num_ranks, options); }
  [[nodiscard]] Balance plan_with(int replicas) const {
    BalanceOptions other = options;
    other.replicas = replicas;
    return plan_balance(counts, num_ranks, other);
  }
};

template <class T>
T pick_one(RandomSource& random, std::initializer_list<T> values) {
  return *(values.begin() + random.below(values.size()));
}

// Rows of three experts a rank. Among seven ranks with a replica each, a greedy search keeps no
// limit below 605; its places allow 589. More ranks have 589 rows already.
template <class T>
std::vector<T> rows_to_pour(int num_ranks) {
  std::vector<T> rows = {10, 6,  24, 662, 47, 91, 2530, 167, 295, 90, 5,
                         5,  24, 42, 6,   10, 6,  58,   8,   19,  15};
  for (int rank = 7; rank < num_ranks; ++rank) {
    rows.insert(rows.end(), {400, 100, 89});
  }
  return rows;
}

inline BalanceCase random_balance_case(uint64_t seed) {
  RandomSource random(seed);
  BalanceCase c;
  c.num_ranks = static_cast<int>(random.between(1, 9));
  c.num_experts = c.num_ranks * pick_one(random, {1, 2, 3, 7});
  c.options.replicas = static_cast<int>(random.between(0, 4));
  c.options.min_rows = pick_one<int64_t>(random, {1, 1, 2, 10, 100});
  const int per_domain = pick_one(random, {0, 1, 2, 3});
  for (int rank = 0; per_domain > 0 && rank < c.num_ranks; ++rank) {
    c.options.domain_of.push_back(rank / per_domain);
  }
  RandomRouting spec;
  spec.num_experts = c.num_experts;
  spec.topk = std::min(c.num_experts, pick_one(random, {1, 2, 4}));
  spec.popularity =
      pick_one(random, {Popularity::kUniform, Popularity::kZipf, Popularity::kOneExpert});
  spec.repeat_experts = true;
  spec.zipf_exponent = pick_one(random, {0.5, 1.0, 2.0});
  spec.hole_fraction = pick_one(random, {0.0, 0.3, 1.0});
  spec.seed = random.next();
  c.counts.resize(static_cast<size_t>(c.num_ranks * c.num_experts));
  for (int rank = 0; rank < c.num_ranks; ++rank) {
    spec.num_tokens = pick_one(random, {0, 1, 30, 200});
    c.routes.push_back(random_routing(spec, rank));
    for (const int32_t expert : c.routes.back().expert) {
      if (expert >= 0) {
        ++c.counts[static_cast<size_t>(rank * c.num_experts + expert)];
      }
    }
  }
  return c;
}

}  // namespace weft
