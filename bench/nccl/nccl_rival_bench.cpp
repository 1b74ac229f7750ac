// SPDX-License-Identifier: Apache-2.0
// How long do dispatch and combine take the usual way on GPUs: permute, NCCL all-to-all, permute?
// The same routing as `weft bench --seed`, so that its times can stand beside Weft's. Also: what
// the permute kernels take alone.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <iterator>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

#include "cli/standard_streams.hpp"
#include "core/gpu/devices.hpp"
#include "measure/limits_cuda.hpp"
#include "measure/measure.hpp"
#include "nccl/rival_contest.hpp"
#include "report/table.hpp"

namespace weft::bench {
namespace {

using namespace weft::program;

constexpr int kSkipped = 77;  // for CTest: nothing to measure here

struct NamedCase {
  char name;
  RivalCase shape;
};

struct Options {
  std::string cases = "ABC";
  int num_gpus = 0;  // 0: all
  int limit_seconds = 120;
  bool is_smoke = false;
  std::string json_path;
  NcclContestOptions contest = {};
};

std::vector<NamedCase> cases_of(const Options& options, int num_gpus) {
  std::vector<NamedCase> all = {
      {'A', {num_gpus, 4096, 7168, 256, 8}},
      {'B', {num_gpus, 8192, 2048, 128, 8}},
      {'C', {num_gpus, 4096, 4096, 8, 2}},
  };
  if (options.is_smoke) {
    return {{'A', {num_gpus, 64, 256, 8 * num_gpus, 4}}};
  }
  std::erase_if(all, [&](const NamedCase& entry) {
    return options.cases.find(entry.name) == std::string::npos ||
           entry.shape.num_experts % num_gpus != 0;
  });
  return all;
}

Table table_of(const std::vector<NcclResult>& results) {
  Table table(
      {"operation",
       "way",
       "checked",
       "p50 us",
       "p99 us",
       "wire GB/s per GPU",
       "kernel GB/s",
       "limit us",
       "% of limit"}
  );
  const auto text = [](double value, int digits) {
    return value > 0 ? fmt::format("{:.{}f}", value, digits) : "-";
  };
  for (const NcclResult& result : results) {
    const ResultRow& row = result.row;
    table.add_row({
        row.op,
        row.mode,
        row.checked ? "yes" : "WRONG",
        text(row.us_p50, 1),
        text(row.us_p99, 1),
        text(row.wire_gbps() / row.ranks, 1),
        text(result.kernel_bytes / row.us_p50 / 1e3, 0),
        text(row.limit_us, 1),
        text(row.percent_of_limit(), 1),
    });
  }
  return table;
}

void measure_limits(NcclContestOptions& options, int num_gpus) {
  options.link_gbps = num_gpus > 1 ? all_to_all_limit_gbps() : 0;
  options.local_copy_gbps = local_copy_limit_gbps();
  fmt::print(
      "copy engines move {:.1f} GB/s out of each GPU; a copy inside one reads and writes {:.0f} "
      "GB/s\n",
      options.link_gbps,
      options.local_copy_gbps
  );
}

int run(Options options) {
  const GpuList gpus = list_gpus();
  if (gpus.gpus.empty()) {
    fmt::print("no GPU to measure ({})\n", gpus.none_reason);
    return kSkipped;
  }
  const auto num_found = static_cast<int>(gpus.gpus.size());
  const int num_gpus = options.num_gpus > 0 ? std::min(options.num_gpus, num_found) : num_found;
  const NcclLibrary library;
  fmt::print(
      "NCCL {} ({}), {} x {}\n", library.version(), library.path(), num_gpus, gpus.gpus[0].name
  );
  measure_limits(options.contest, num_gpus);
  const std::vector<NamedCase> cases = cases_of(options, num_gpus);
  std::vector<RivalCase> shapes;
  std::ranges::transform(cases, std::back_inserter(shapes), &NamedCase::shape);
  std::vector<ResultRow> rows;
  const Stopwatch watch;
  run_nccl_cases(library, shapes, options.contest, [&](size_t i, const auto& results) {
    for (const NcclResult& result : results) {
      rows.push_back(result.row);
    }
    const RivalCase& shape = shapes[i];
    fmt::print(
        "\ncase {}: {} GPUs, {} tokens each, hidden {}, {} experts, top-{} (after {:.1f} s)\n{}",
        cases[i].name,
        num_gpus,
        count_text(shape.num_tokens),
        shape.hidden,
        shape.num_experts,
        shape.topk,
        watch.seconds(),
        table_of(results).text()
    );
    static_cast<void>(std::fflush(stdout));
  });
  if (!options.json_path.empty()) {
    const double gbps = options.contest.link_gbps;
    save_results(options.json_path, rows, {.scatter = gbps, .gather = gbps});
  }
  return std::ranges::all_of(rows, [](const ResultRow& row) { return row.checked; }) ? 0 : 1;
}

// NCCL waits for ever; this program does not.
void end_in_time(int) {
  constexpr std::string_view kText = "nccl_rival_bench: out of time\n";
  static_cast<void>(!write(STDERR_FILENO, kText.data(), kText.size()));
  _exit(1);
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::program::open_standard_streams();
  weft::bench::Options options;
  CLI::App app("permute + NCCL all-to-all + permute on the GPUs of this machine");
  app.add_option("--cases", options.cases, "Reference cases, letters of ABC")
      ->capture_default_str();
  app.add_option("--gpus", options.num_gpus, "How many GPUs take part")->default_str("all");
  app.add_option("--iterations", options.contest.iterations, "Samples")->capture_default_str();
  app.add_option("--warmup", options.contest.warmup, "Calls before the first sample")
      ->capture_default_str();
  app.add_option("--seed", options.contest.seed, "Of the routing")->capture_default_str();
  app.add_option("--limit-seconds", options.limit_seconds, "The program ends by then")
      ->capture_default_str();
  app.add_option("--json", options.json_path, "Write the results here");
  app.add_flag("--smoke", options.is_smoke, "Tiny and quick: does it run at all?");
  CLI11_PARSE(app, argc, argv);
  if (options.is_smoke) {
    options.contest.iterations = 2;
    options.contest.warmup = 1;
  }
  static_cast<void>(std::signal(SIGALRM, weft::bench::end_in_time));
  alarm(static_cast<unsigned>(std::max(options.limit_seconds, 1)));
  try {
    return weft::bench::run(options);
  } catch (const weft::Error& error) {
    fmt::print(stderr, "nccl_rival_bench: {}\n", error.what());
    // A machine without NCCL has nothing to compare with.
    const bool is_missing = std::string_view(error.what()).starts_with("load(nccl)");
    _exit(is_missing ? weft::bench::kSkipped : 1);
  } catch (const std::exception& error) {
    fmt::print(stderr, "nccl_rival_bench: {}\n", error.what());
    return 1;
  }
}
