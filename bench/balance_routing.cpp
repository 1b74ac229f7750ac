// SPDX-License-Identifier: Apache-2.0
#include "balance_routing.hpp"

#include <algorithm>

#include "plan/balance/balance.hpp"
#include "plan/build.hpp"
#include "plan/file/routing_file.hpp"
#include "plan/random_routing.hpp"

namespace weft::bench {
namespace {

constexpr double kImbalance = 1.55;  // of a training run with a router that balances its loss

std::vector<RouteTable> draw(const BalanceShape& shape, double exponent) {
  RandomRouting spec;
  spec.num_tokens = shape.tokens;
  spec.num_experts = shape.experts;
  spec.topk = kBalanceTopk;
  spec.popularity = exponent > 0 ? Popularity::kZipf : Popularity::kUniform;
  spec.zipf_exponent = exponent;
  spec.with_weights = false;
  spec.seed = shape.seed;
  std::vector<RouteTable> tables;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    tables.push_back(random_routing(spec, rank));
  }
  return tables;
}

// The first `skewed` tokens of each rank choose as in `a`, the others as in `b`.
RouteCounts count(
    const BalanceShape& shape,
    const std::vector<RouteTable>& a,
    const std::vector<RouteTable>& b,
    int64_t skewed
) {
  RouteCounts counts;
  for (size_t rank = 0; rank < a.size(); ++rank) {
    RankCounts one = count_routes({}, shape.experts, shape.ranks, {});
    add_counts(a[rank], 0, skewed, one);
    add_counts(b[rank], skewed, shape.tokens, one);
    counts.insert(counts.end(), one.routes.begin(), one.routes.end());
  }
  return counts;
}

RouteCounts zipf(const BalanceShape& shape, double exponent) {
  const auto tables = draw(shape, exponent);
  return count(shape, tables, tables, 0);
}

// The first experts, which lie on as few ranks as can be.
RouteCounts one_set(const BalanceShape& shape) {
  RouteCounts counts;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    for (int expert = 0; expert < shape.experts; ++expert) {
      counts.push_back(expert < kBalanceTopk ? static_cast<int32_t>(shape.tokens) : 0);
    }
  }
  return counts;
}

// Counts in which just enough tokens choose popular experts for an imbalance of kImbalance.
RouteCounts with_imbalance(const BalanceShape& shape) {
  const auto skewed = draw(shape, 2.0);
  const auto uniform = draw(shape, 0.0);
  int64_t low = 0;
  int64_t high = shape.tokens;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    const bool is_enough = imbalance(shape, count(shape, skewed, uniform, middle)) >= kImbalance;
    (is_enough ? high : low) = middle;
  }
  return count(shape, skewed, uniform, high);
}

// A recorded step as if its tokens had been shared out to other ranks, and how many they are.
RouteCounts recorded(const RoutingRecord& record, BalanceShape& shape) {
  std::vector<int32_t> experts;
  for (const RouteTable& table : record.routes) {
    experts.insert(experts.end(), table.expert.begin(), table.expert.end());
  }
  const auto ranks = static_cast<size_t>(shape.ranks);
  shape.tokens = static_cast<int64_t>(experts.size() / kBalanceTopk / ranks);
  RouteCounts counts(ranks * static_cast<size_t>(shape.experts), 0);
  for (size_t i = 0; i < experts.size() / ranks * ranks; ++i) {
    const size_t rank = i * ranks / experts.size();
    const auto expert = static_cast<size_t>(experts[i]);
    ++counts[rank * static_cast<size_t>(shape.experts) + expert];
  }
  return counts;
}

}  // namespace

double of_mean(const BalanceShape& shape, int64_t rows) {
  return static_cast<double>(rows) / static_cast<double>(shape.tokens * kBalanceTopk);
}

double imbalance(const BalanceShape& shape, const RouteCounts& counts) {
  return of_mean(shape, plan_balance(counts, shape.ranks, {}).placement.busiest());
}

std::vector<NamedRouting> balance_routings(const std::string& path) {
  std::vector<NamedRouting> all = {
      {"uniform", [](BalanceShape& shape) { return zipf(shape, 0.0); }},
      {"Zipf 0.8", [](BalanceShape& shape) { return zipf(shape, 0.8); }},
      {"Zipf 1.2", [](BalanceShape& shape) { return zipf(shape, 1.2); }},
      {"one set of 8", one_set},
      {"imbalance 1.55", with_imbalance},
  };
  if (!path.empty()) {
    RoutingFileReader file(path);
    const RoutingRecord last = file.read(file.num_records() - 1);
    const int experts = file.shape().num_experts;
    all.push_back({"trained router", [last, experts](BalanceShape& shape) {
                     return shape.experts == experts ? recorded(last, shape) : RouteCounts();
                   }});
  }
  return all;
}

}  // namespace weft::bench
