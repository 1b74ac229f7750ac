// SPDX-License-Identifier: Apache-2.0
// `weft tune`: how the multiprocessors of this machine's GPUs are best shared between the two roles
// of dispatch and combine, for the shapes asked for.
#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <memory>

#include "bench/run.hpp"
#include "call/call.hpp"
#include "cli/program.hpp"
#include "cli/ranks.hpp"
#include "core/atomic_file.hpp"
#include "core/check.hpp"
#include "core/gpu/devices.hpp"
#include "cuda/exchange/tuning.hpp"
#include "report/json_text.hpp"
#include "report/table.hpp"

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

void print_splits(const std::string& name, const std::vector<TunedSplit>& splits) {
  Table table({"operation", "SMs", "senders", "others", "p50 us"});
  for (const Op op : {Op::kDispatch, Op::kCombine}) {
    for (const TunedSplit& split : splits) {
      if (split.op == op) {
        table.add_row(
            {fmt::format("{}{}", op_name(op), split.one_row ? ", rank_major" : ""),
             fmt::format("{}", split.blocks.first + split.blocks.second),
             fmt::format("{}", split.blocks.first),
             fmt::format("{}", split.blocks.second),
             fmt::format("{:.1f}", split.us)}
        );
      }
    }
  }
  fmt::print("case {}, rows of {} B\n\n{}\n", name, splits.front().row_bytes, table.text());
}

// One split a line, so that such a file is short enough to be kept.
std::string file_text(const std::vector<TunedSplit>& splits) {
  std::string text = "{\n\"splits\": [";
  for (const TunedSplit& split : splits) {
    nlohmann::ordered_json json = {{"op", op_name(split.op)}};
    if (split.one_row) {
      json["layout"] = "rank_major";
    }
    json["ranks"] = split.num_ranks;
    json["row_bytes"] = split.row_bytes;
    json["senders"] = split.blocks.first;
    json["others"] = split.blocks.second;
    json["us"] = rounded(split.us, 1);
    text += fmt::format("{}\n{}", &split == splits.data() ? "" : ",", json_text(json, kOneLine));
  }
  return text + "\n]\n}\n";
}

// Says what calls of this many ranks use where WEFT_TUNING names no file.
std::string built_in_text(int num_ranks, int num_sms) {
  const auto [below, above] =
      measured_ranks(built_in_tuning(), {Op::kDispatch, num_ranks, 14336, num_sms});
  if (below == 0) {
    return "a fixed share: nothing so small was measured";
  }
  if (below != above) {
    return fmt::format("interpolated between those measured with {} and {}", below, above);
  }
  return below == num_ranks ? "measured" : fmt::format("those measured with {}", below);
}

int tune_rank(const Group& group, const TuneOptions& options) {
  std::vector<TunedSplit> measured;
  for (const std::string& name : options.cases) {
    BenchOptions bench = options.bench;
    take_case(bench, name);
    const std::vector<TunedSplit> splits = run_gpu_tune(group, bench);
    measured.insert(measured.end(), splits.begin(), splits.end());
    if (group.rank() == 0) {
      print_splits(name, splits);
    }
  }
  if (group.rank() == 0) {
    const int num_sms = list_gpus().gpus.front().num_sms;
    fmt::print(
        "built-in splits for {} ranks: {}\n",
        group.num_ranks(),
        built_in_text(group.num_ranks(), num_sms)
    );
  }
  if (group.rank() == 0 && !options.path.empty()) {
    write_file_atomically(options.path, file_text(useful_splits(measured)));
    fmt::print("wrote {}\n", options.path);
  }
  return 0;
}

}  // namespace

void add_tune(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("tune", "Measure how calls should share this machine's GPUs");
  auto options = std::make_shared<TuneOptions>();
  options->bench.device.wanted = "cuda";
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
    check_outputs({{"--out", options->path}});
    choose_device(options->bench.device);
    take_all_gpus(*command, options->bench.device, options->bench.ranks);
    run_ranks(options->bench.ranks, [&](Group& group) { return tune_rank(group, *options); });
  });
}

}  // namespace weft::program
