// SPDX-License-Identifier: Apache-2.0
// Measures the share of a plain libfabric stream between two hosts that dispatch and combine
// between all hosts reach, when as many bytes cross from host to host, in the same run. Start it as
// `weft bench`, on two hosts or more (docs/launch.md); bench/hosts.py plays them on one machine.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <exception>
#include <string>

#include "cli/standard_streams.hpp"
#include "hosts_contest.hpp"
#include "report/table.hpp"

namespace weft::bench {
namespace {

using namespace weft::program;

constexpr int kExitSkipped = 77;

void print_result(const Group& group, const HostsContest& result) {
  fmt::print(
      "{} ranks on {} hosts, {:.1f} MB cross from host to host; a plain stream of {} between two "
      "hosts carries {:.2f} GB/s\n\n",
      group.num_ranks(),
      group.topology().domains.size(),
      result.crossing_bytes / 1e6,
      result.provider,
      result.crossing_bytes / result.stream_us / 1e3
  );
  Table table({"operation", "checked", "p50 us", "p99 us", "GB/s between hosts", "% of the stream"}
  );
  for (const ResultRow& row : result.rows) {
    table.add_row({
        row.op,
        row.checked ? "yes" : "no",
        fmt::format("{:.1f}", row.us_p50),
        fmt::format("{:.1f}", row.us_p99),
        row.wire_bytes > 0 ? fmt::format("{:.2f}", row.wire_gbps()) : "",
        row.rival ? fmt::format("{:.1f}", 100 * row.rival->us_p50 / row.us_p50) : "",
    });
  }
  fmt::print("{}", table.text());
}

int run(const ContestShape& shape, const std::string& json_path) {
  const Group group = Group::from_env();
  if (group.topology().domains.size() < 2) {
    if (group.rank() == 0) {
      fmt::print("hosts_bench: the ranks are on one host (at least 2)\n");
    }
    return kExitSkipped;
  }
  const HostsContest result = run_hosts_contest(group, shape);
  if (group.rank() == 0) {
    print_result(group, result);
    if (!json_path.empty()) {
      save_results(json_path, result.rows, {});
    }
  }
  return result.is_good ? 0 : 1;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::program::open_standard_streams();
  weft::bench::ContestShape shape;
  std::string json_path;
  bool is_smoke = false;
  CLI::App app("Dispatch and combine between hosts against a plain libfabric stream");
  app.add_option("--tokens", shape.num_tokens, "Tokens of each rank")->capture_default_str();
  app.add_option("--hidden", shape.hidden, "Elements of a token, bf16")->capture_default_str();
  app.add_option("--experts", shape.num_experts, "Experts of all ranks")->capture_default_str();
  app.add_option("--topk", shape.topk, "Experts of a token")->capture_default_str();
  app.add_option(
      "--threads-per-rank", shape.num_threads, "Workers of each rank; 0: a share of the cores"
  );
  app.add_option("--gpus", shape.num_gpus, "On so many GPUs of each host; 0: on its CPUs");
  app.add_option("--iterations", shape.iterations, "Samples")->capture_default_str();
  app.add_option("--warmup", shape.warmup, "Calls before the first")->capture_default_str();
  app.add_option("--json", json_path, "Write the results here");
  app.add_flag("--smoke", is_smoke, "Tiny and quick: does it run at all?");
  CLI11_PARSE(app, argc, argv);
  if (is_smoke) {
    shape = {
        .num_tokens = 16,
        .hidden = 256,
        .num_experts = 16,
        .topk = 2,
        .iterations = 1,
        .warmup = 1};
  }
  try {
    return weft::bench::run(shape, json_path);
  } catch (const std::exception& error) {
    fmt::print(stderr, "hosts_bench: {}\n", error.what());
    return 1;
  }
}
