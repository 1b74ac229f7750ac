// SPDX-License-Identifier: Apache-2.0
// `weft tune`: how the multiprocessors of this machine's GPUs are best shared between the two roles
// of dispatch and combine, for the shapes asked for.
#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <memory>

#include "bench_cases.hpp"
#include "commands.hpp"
#include "core/atomic_file.hpp"
#include "core/check.hpp"
#include "core/devices.hpp"
#include "gpu_bench.hpp"
#include "json_text.hpp"
#include "ranks.hpp"
#include "table.hpp"

namespace weft::program {
namespace {

constexpr const char* kFooter =
    R"(The file that it writes is used where WEFT_TUNING names it. A call with a bound on multiprocessors
then takes the fastest split that was measured within that bound.

Examples:
  weft tune --out h200.tuning.json              reference cases A, B and C
  weft tune --case A --out a.tuning.json        one of them
  WEFT_TUNING=h200.tuning.json weft bench --case A)";

struct TuneOptions {
  BenchOptions bench;
  std::vector<std::string> cases = {"A", "B", "C"};
  std::string path;
};

std::string_view op_of(const GpuSplit& split) {
  return split.op == BenchOp::kDispatch ? "dispatch" : "combine";
}

void print_splits(const std::string& name, const std::vector<GpuSplit>& splits) {
  Table table({"operation", "SMs", "senders", "others", "p50 us"});
  for (const BenchOp op : {BenchOp::kDispatch, BenchOp::kCombine}) {
    for (const GpuSplit& split : splits) {
      if (split.op == op) {
        table.add_row(
            {std::string(op_of(split)),
             fmt::format("{}", split.senders + split.others),
             fmt::format("{}", split.senders),
             fmt::format("{}", split.others),
             fmt::format("{:.1f}", split.us)}
        );
      }
    }
  }
  fmt::print("case {}, rows of {} B\n\n{}\n", name, splits.front().row_bytes, table.text());
}

nlohmann::ordered_json json_of(const GpuSplit& split, int num_ranks) {
  return {
      {"op", op_of(split)},
      {"ranks", num_ranks},
      {"row_bytes", split.row_bytes},
      {"senders", split.senders},
      {"others", split.others},
      {"us", std::round(split.us * 10) / 10}};
}

int tune_rank(const Group& group, const TuneOptions& options) {
  nlohmann::ordered_json json = {{"splits", nlohmann::ordered_json::array()}};
  for (const std::string& name : options.cases) {
    BenchOptions bench = options.bench;
    take_case(bench, name);
    const std::vector<GpuSplit> splits = run_gpu_tune(group, bench);
    for (const GpuSplit& split : splits) {
      json["splits"].push_back(json_of(split, group.num_ranks()));
    }
    if (group.rank() == 0) {
      print_splits(name, splits);
    }
  }
  if (group.rank() == 0 && !options.path.empty()) {
    write_file_atomically(options.path, json_text(json) + "\n");
    fmt::print("wrote {}\n", options.path);
  }
  return 0;
}

}  // namespace

void add_tune(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("tune", "Measure how calls should share this machine's GPUs");
  auto options = std::make_shared<TuneOptions>();
  options->bench.iterations = 15;
  options->bench.warmup = 3;
  command->footer(kFooter);
  add_rank_options(*command, options->bench.ranks);
  command->add_option("--case", options->cases, "Shapes of reference cases")
      ->delimiter(',')
      ->check(CLI::IsMember({"A", "B", "C", "D"}))
      ->default_str("A,B,C");
  command->add_option("--out", options->path, "Write the measurements here");
  command->callback([options, command] {
    const GpuList list = list_gpus();
    WEFT_CHECK(
        Context{},
        !list.gpus.empty(),
        ErrorCode::kNotAvailable,
        "tune: there is no GPU ({})",
        list.none_reason
    );
    options->bench.ranks.use_threads = true;  // one process drives all GPUs
    if (command->count("--ranks") == 0) {
      options->bench.ranks.num_ranks = static_cast<int>(list.gpus.size());
    }
    run_ranks(options->bench.ranks, [&](Group& group) { return tune_rank(group, *options); });
  });
}

}  // namespace weft::program
