// SPDX-License-Identifier: Apache-2.0
// How even are the ranks after balancing, and how even could they be with the same placement? No
// times: counts of made-up and of recorded routing, planned by the library, and the oracle of the
// tests.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "balance_oracle.hpp"
#include "cli/standard_streams.hpp"
#include "measure/results.hpp"
#include "plan/balance/balance.hpp"
#include "plan/build.hpp"
#include "plan/file/routing_file.hpp"
#include "plan/random_routing.hpp"
#include "report/json_text.hpp"
#include "report/table.hpp"

namespace weft::program {
namespace {

constexpr int kTopk = 8;
constexpr double kImbalance = 1.55;  // of a training run with a router that balances its loss

struct Shape {
  int ranks;
  int experts;
  int64_t tokens;  // of each rank
  uint64_t seed;
};

using Counts = std::vector<int32_t>;  // [ranks, experts]

std::vector<RouteTable> draw(const Shape& shape, double exponent) {
  RandomRouting spec;
  spec.num_tokens = shape.tokens;
  spec.num_experts = shape.experts;
  spec.topk = kTopk;
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
Counts count(
    const Shape& shape,
    const std::vector<RouteTable>& a,
    const std::vector<RouteTable>& b,
    int64_t skewed
) {
  Counts counts;
  for (size_t rank = 0; rank < a.size(); ++rank) {
    RankCounts one = count_routes({}, shape.experts, shape.ranks, {});
    add_counts(a[rank], 0, skewed, one);
    add_counts(b[rank], skewed, shape.tokens, one);
    counts.insert(counts.end(), one.routes.begin(), one.routes.end());
  }
  return counts;
}

Counts zipf(const Shape& shape, double exponent) {
  const auto tables = draw(shape, exponent);
  return count(shape, tables, tables, 0);
}

// The first experts, which lie on as few ranks as can be.
Counts one_set(const Shape& shape) {
  Counts counts;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    for (int expert = 0; expert < shape.experts; ++expert) {
      counts.push_back(expert < kTopk ? static_cast<int32_t>(shape.tokens) : 0);
    }
  }
  return counts;
}

double of_mean(const Shape& shape, int64_t rows) {
  return static_cast<double>(rows) / static_cast<double>(shape.tokens * kTopk);
}

double imbalance(const Shape& shape, const Counts& counts) {
  return of_mean(shape, plan_balance(counts, shape.ranks, {}).placement.busiest());
}

// As many tokens choose popular experts as make the ranks so uneven.
Counts with_imbalance(const Shape& shape) {
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
Counts recorded(const RoutingRecord& record, Shape& shape) {
  std::vector<int32_t> experts;
  for (const RouteTable& table : record.routes) {
    experts.insert(experts.end(), table.expert.begin(), table.expert.end());
  }
  const auto ranks = static_cast<size_t>(shape.ranks);
  shape.tokens = static_cast<int64_t>(experts.size() / kTopk / ranks);
  Counts counts(ranks * static_cast<size_t>(shape.experts), 0);
  for (size_t i = 0; i < experts.size() / ranks * ranks; ++i) {
    const size_t rank = i * ranks / experts.size();
    const auto expert = static_cast<size_t>(experts[i]);
    ++counts[rank * static_cast<size_t>(shape.experts) + expert];
  }
  return counts;
}

struct NamedRouting {
  std::string name;
  std::function<Counts(Shape&)> counts;
};

std::vector<NamedRouting> routings(const std::string& path) {
  std::vector<NamedRouting> all = {
      {"uniform", [](Shape& shape) { return zipf(shape, 0.0); }},
      {"Zipf 0.8", [](Shape& shape) { return zipf(shape, 0.8); }},
      {"Zipf 1.2", [](Shape& shape) { return zipf(shape, 1.2); }},
      {"one set of 8", one_set},
      {"imbalance 1.55", with_imbalance},
  };
  if (!path.empty()) {
    RoutingFileReader file(path);
    const RoutingRecord last = file.read(file.num_records() - 1);
    const int experts = file.shape().num_experts;
    all.push_back({"trained router", [last, experts](Shape& shape) {
                     return shape.experts == experts ? recorded(last, shape) : Counts();
                   }});
  }
  return all;
}

nlohmann::ordered_json measure(
    const Shape& shape, const std::string& routing, const Counts& counts, int replicas
) {
  const Balance balance = plan_balance(counts, shape.ranks, {.replicas = replicas});
  const auto copies = balance.replicas();
  return {
      {"op", "balance"},
      {"ranks", shape.ranks},
      {"tokens", shape.tokens},
      {"experts", shape.experts},
      {"topk", kTopk},
      {"seed", shape.seed},
      {"replicas", replicas},
      {"routing", routing},
      {"busiest_before", rounded(imbalance(shape, counts), 4)},
      {"busiest_of_mean", rounded(of_mean(shape, balance.placement.busiest()), 4)},
      {"oracle_of_mean", rounded(of_mean(shape, least_busiest(balance.placement)), 4)},
      {"copies", std::ranges::count_if(copies, [](int32_t expert) { return expert >= 0; })},
  };
}

// One line: as many rows as the mean rank's are 1.
std::vector<std::string> cells(
    const nlohmann::ordered_json& one, const nlohmann::ordered_json& two
) {
  const auto number = [](const nlohmann::ordered_json& row, const char* key) {
    return fmt::format("{:.4f}", row[key].get<double>());
  };
  return {
      one["routing"],
      fmt::format("{}", one["ranks"].get<int>()),
      fmt::format("{}", one["experts"].get<int>()),
      number(one, "busiest_before"),
      number(one, "busiest_of_mean"),
      number(one, "oracle_of_mean"),
      number(two, "busiest_of_mean"),
      number(two, "oracle_of_mean"),
      fmt::format("{}", two["copies"].get<int>()),
  };
}

int run(int argc, char** argv) {
  CLI::App app("How even are ranks after balancing?");
  std::string json_path;
  std::string routing_path;
  int64_t tokens = 4096;
  uint64_t seed = 1;
  bool is_smoke = false;
  app.add_option("--routing", routing_path, "Take the last step of this routing file too (top-8)")
      ->check(CLI::ExistingFile);
  app.add_option("--json", json_path, "Write the results to this file");
  app.add_option("--tokens", tokens, "Tokens of each rank")->check(CLI::Range(1, 1 << 20));
  app.add_option("--seed", seed, "Seed of the routing");
  app.add_flag("--smoke", is_smoke, "Small, as a test");
  CLI11_PARSE(app, argc, argv);

  auto rows = nlohmann::ordered_json::array();
  Table table(columns("routing|ranks|experts|unbalanced|1 replica|at best|2 replicas|at best|copies"
  ));
  for (const NamedRouting& routing : routings(routing_path)) {
    for (const int ranks : is_smoke ? std::vector{8} : std::vector{8, 16, 32, 64}) {
      for (const int experts : {128, 256}) {
        Shape shape = {ranks, experts, is_smoke ? 64 : tokens, seed};
        const Counts counts = routing.counts(shape);
        if (counts.empty()) {
          continue;
        }
        for (const int replicas : {1, 2, 4}) {
          rows.push_back(measure(shape, routing.name, counts, replicas));
        }
        table.add_row(cells(rows[rows.size() - 3], rows[rows.size() - 2]));
      }
    }
  }
  fmt::print("{}", table.text());
  if (!json_path.empty()) {
    save_results(json_path, rows, {});
  }
  return 0;
}

}  // namespace
}  // namespace weft::program

int main(int argc, char** argv) {
  weft::program::open_standard_streams();
  return weft::program::run(argc, argv);
}
