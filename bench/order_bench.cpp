// SPDX-License-Identifier: Apache-2.0
// How many bytes does combine carry between ranks with each order of sums? No times: plans of
// made-up routing say it.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <string>
#include <vector>

#include "cli/standard_streams.hpp"
#include "measure/results.hpp"
#include "plan/build.hpp"
#include "report/json_text.hpp"
#include "report/table.hpp"
#include "routing/report.hpp"
#include "routing/source.hpp"
#include "weft/plan.hpp"

namespace weft::bench {
namespace {

using namespace weft::program;

struct Case {
  char name;
  int64_t tokens;  // of each rank
  int64_t hidden;
  int experts;
  int topk;
};

constexpr Case kCases[] = {{'A', 4096, 7168, 256, 8}, {'B', 8192, 2048, 128, 8}};

MadeUpRouting routing_of(const Case& shape, int ranks, uint64_t seed) {
  MadeUpRouting spec;
  spec.num_ranks = ranks;
  spec.num_tokens = shape.tokens;
  spec.num_experts = shape.experts;
  spec.topk = shape.topk;
  spec.seed = seed;
  return spec;
}

nlohmann::ordered_json count(
    const Case& shape, const std::vector<RouteTable>& routes, SumOrder order
) {
  PlanOptions options;
  options.order = order;
  const RowFormat format = {DType::kBFloat16, shape.hidden};
  const PlanReport report = make_plan_report("made up", routes, shape.experts, options, format);
  int64_t wire_bytes = 0;
  int64_t logical_bytes = 0;
  for (const Plan& plan : report.plans) {
    wire_bytes += plan.returned_bytes(report.row_bytes());
    logical_bytes += plan.logical_bytes(report.row_bytes());
  }
  return {
      {"op", "combine"},
      {"executor", "none"},
      {"dtype", "bfloat16"},
      {"case", std::string(1, shape.name)},
      {"ranks", report.num_ranks()},
      {"tokens", shape.tokens},
      {"hidden", shape.hidden},
      {"experts", shape.experts},
      {"topk", shape.topk},
      {"mode", fmt::format("counted {}", order_name(order))},
      {"us_p50", nullptr},
      {"wire_bytes", wire_bytes},
      {"logical_bytes", logical_bytes},
  };
}

std::vector<std::string> cells(
    const nlohmann::ordered_json& by_rank, const nlohmann::ordered_json& by_choice
) {
  const auto bytes = [](const nlohmann::ordered_json& row) {
    return row["wire_bytes"].get<double>();
  };
  return {
      by_rank["case"],
      fmt::format("{}", by_rank["ranks"].get<int>()),
      fmt::format("{:.2f}", bytes(by_rank) / 1e9),
      fmt::format("{:.2f}", bytes(by_choice) / 1e9),
      fmt::format("{:.2f}", bytes(by_choice) / bytes(by_rank)),
  };
}

int run(int argc, char** argv) {
  CLI::App app("How many bytes does combine carry with each order of sums?");
  std::string json_path;
  uint64_t seed = 1;
  bool is_smoke = false;
  app.add_option("--seed", seed, "Seed of the routing")->capture_default_str();
  app.add_option("--json", json_path, "Write the results to this file");
  app.add_flag("--smoke", is_smoke, "Small, as a test");
  CLI11_PARSE(app, argc, argv);

  auto rows = nlohmann::ordered_json::array();
  Table table(columns("case|ranks|order rank, GB|order topk, GB|times"));
  for (Case shape : kCases) {
    shape.tokens = is_smoke ? 64 : shape.tokens;
    for (const int ranks : {4, 8}) {
      const RoutingMoment moment = make_up_routing(routing_of(shape, ranks, seed));
      rows.push_back(count(shape, moment.routes, SumOrder::kRank));
      rows.push_back(count(shape, moment.routes, SumOrder::kTopk));
      table.add_row(cells(rows[rows.size() - 2], rows.back()));
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
