// SPDX-License-Identifier: Apache-2.0
// How much faster than the usual way (permute, MPI_Alltoallv, permute) are dispatch and combine on
// the CPUs of one host? Both sides in one run, on the same routing, in turns. Run by mpirun; see
// scripts/bench-cpu.
#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <exception>
#include <string>

#include "cli/standard_streams.hpp"
#include "mpi/contest.hpp"
#include "report/table.hpp"

namespace weft::bench {
namespace {

using namespace weft::program;

void print_result(const ContestResult& result) {
  Table table(
      {"operation", "checked", "weft p50 us", "% of limit", "rival", "rival p50 us", "times faster"}
  );
  for (const ResultRow& row : result.rows) {
    table.add_row({
        row.op,
        row.checked ? "yes" : "WRONG",
        fmt::format("{:.1f}", row.us_p50),
        row.limit_us > 0 ? fmt::format("{:.1f}", row.percent_of_limit()) : "-",
        row.rival->name,
        fmt::format("{:.1f}", row.rival->us_p50),
        fmt::format("{:.2f}", row.rival->us_p50 / row.us_p50),
    });
  }
  fmt::print(
      "plain copies reach {:.1f} GB/s scattering, {:.1f} GB/s gathering\n\n{}",
      result.rates.scatter,
      result.rates.gather,
      table.text()
  );
}

int run(const ContestOptions& options, const std::string& json_path) {
  const Group group = Group::from_env();
  const ContestResult result = run_contest(group, options);
  if (group.rank() == 0) {
    print_result(result);
    if (!json_path.empty()) {
      save_results(json_path, result.rows, result.rates);
    }
  }
  const auto& rows = result.rows;
  return std::all_of(rows.begin(), rows.end(), [](const auto& row) { return row.checked; }) ? 0 : 1;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::program::open_standard_streams();
  weft::bench::ContestOptions options;
  std::string json_path;
  bool is_smoke = false;
  CLI::App app("Weft against permute + MPI_Alltoallv + permute; start it with mpirun");
  app.add_option("--tokens", options.shape.max_tokens, "Tokens of each rank")
      ->capture_default_str();
  app.add_option("--hidden", options.shape.hidden, "Elements of a token")->capture_default_str();
  app.add_option("--experts", options.shape.num_experts, "Experts of all ranks")
      ->capture_default_str();
  app.add_option("--topk", options.shape.topk, "Experts of a token")->capture_default_str();
  app.add_option("--pad", options.shape.pad_multiple, "Rows of an expert are a multiple of this")
      ->capture_default_str();
  app.add_option("--threads-per-rank", options.shape.num_threads, "Of both sides")
      ->capture_default_str();
  app.add_option("--skew", options.skew, "Popularity of the n-th expert is 1 / n^SKEW")
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Of routing and rows")->capture_default_str();
  app.add_option("--iterations", options.iterations, "Samples")->capture_default_str();
  app.add_option("--warmup", options.warmup, "Calls before the first sample")
      ->capture_default_str();
  app.add_option("--json", json_path, "Write the results here");
  app.add_flag("--smoke", is_smoke, "Tiny and quick: does it run at all?");
  CLI11_PARSE(app, argc, argv);
  if (is_smoke) {
    options.shape.max_tokens = 64;
    options.shape.hidden = 128;
    options.iterations = 2;
    options.warmup = 1;
  }
  MPI_Init(&argc, &argv);
  int status = 1;
  try {
    status = weft::bench::run(options, json_path);
  } catch (const std::exception& error) {
    fmt::print(stderr, "cpu_vs_mpi_bench: {}\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return status;
}
