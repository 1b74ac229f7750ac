// SPDX-License-Identifier: Apache-2.0
// How even are the ranks after balancing, and how even could they be with the same placement? No
// times: counts of made-up and of recorded routing, planned by the library, and the oracle of the
// tests.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "balance_oracle.hpp"
#include "balance_routing.hpp"
#include "cli/standard_streams.hpp"
#include "measure/results.hpp"
#include "plan/balance/balance.hpp"
#include "report/json_text.hpp"
#include "report/table.hpp"

namespace weft::bench {
namespace {

using namespace weft::program;

nlohmann::ordered_json measure(
    const BalanceShape& shape, const std::string& routing, const RouteCounts& counts, int replicas
) {
  const Balance balance = plan_balance(counts, shape.ranks, {.replicas = replicas});
  const auto copies = balance.replicas();
  return {
      {"op", "balance"},
      {"ranks", shape.ranks},
      {"tokens", shape.tokens},
      {"experts", shape.experts},
      {"topk", kBalanceTopk},
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
  for (const NamedRouting& routing : balance_routings(routing_path)) {
    for (const int ranks : is_smoke ? std::vector{8} : std::vector{8, 16, 32, 64}) {
      for (const int experts : {128, 256}) {
        BalanceShape shape = {ranks, experts, is_smoke ? 64 : tokens, seed};
        const RouteCounts counts = routing.counts(shape);
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
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::program::open_standard_streams();
  return weft::bench::run(argc, argv);
}
