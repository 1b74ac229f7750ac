// SPDX-License-Identifier: Apache-2.0
// `weft bench`: how fast the operations are here, against what copying can reach.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "bench/run.hpp"
#include "cli/choices.hpp"
#include "cli/program.hpp"
#include "cli/ranks.hpp"
#include "measure/limits_cuda.hpp"
#include "measure/results.hpp"
#include "plan/file/routing_file.hpp"

namespace weft::program {
namespace {

constexpr const char* kFooter =
    R"(Times are of the slowest rank of each sample; every sample starts behind a barrier and takes the
next of several routings. Before timing, one call of each is compared with what it must give.
The limit is the time in which plain copies move the same bytes (docs/benchmarks.md).

Examples:
  weft bench                                   2048 tokens on each of four ranks
  weft bench dispatch combine --ranks 2        two operations only
  weft bench --routing run.routing             the imbalance of a real model
  weft bench --json out.json --html out.html   for scripts, and with plots)";

// Only what was not asked for.
void shrink(const CLI::App& command, BenchOptions& options) {
  const auto set = [&](const char* name, auto& value, int small) {
    if (command.count(name) == 0) {
      value = small;
    }
  };
  set("--tokens", options.made_up.num_tokens, 64);
  set("--hidden", options.hidden, 256);
  set("--pad", options.pad_multiple, 16);
  set("--iterations", options.iterations, 3);
  set("--warmup", options.warmup, 1);
}

void print_report(const BenchReport& report, const BenchOptions& options) {
  fmt::print("{}\n\n{}", bench_case_text(report), bench_table(report, options.is_checked).text());
  std::vector<ResultRow> rows;
  for (const BenchResult& result : report.results) {
    rows.push_back(result.row);
  }
  if (!options.json_path.empty()) {
    save_results(options.json_path, rows, report.rates);
  }
  if (!options.html_path.empty()) {
    save_bench_page(report, options);
  }
}

int bench_rank(const Group& group, const BenchOptions& options, double limit_gbps) {
  const BenchReport report = options.device.is_on_gpu() ? run_gpu_bench(group, options, limit_gbps)
                                                        : run_bench(group, options);
  if (group.rank() == 0) {
    print_report(report, options);
  }
  const bool is_good = std::all_of(report.results.begin(), report.results.end(), [](const auto& r) {
    return r.row.checked;
  });
  return is_good || !options.is_checked ? 0 : 1;
}

void add_case_options(CLI::App& command, BenchOptions& options) {
  MadeUpRouting& made_up = options.made_up;
  constexpr const char* kRouting = "File of real routing; gives ranks, tokens and experts";
  auto* file = command.add_option("--routing", options.routing_file, kRouting);
  file->check(CLI::ExistingFile);
  add_made_up_options(command, file, made_up);
  add_made_up(command, file, "--experts", made_up.num_experts, "Experts of all ranks")
      ->check(Within(1, kMostExperts));
  add_value(command, "--seed", made_up.seed, "Of routing and rows")->check(any_seed());
  add_row_options(command, options.hidden, options.dtype, options.pad_multiple);
  add_layout_option(command, options.layout);
  add_order_option(command, options.order);
}

void add_gpu_options(CLI::App& command, BenchOptions& options) {
  add_device_option(command, options.device);
  command.add_option("--sms", options.sms, "Multiprocessors of a call on a GPU; several as 24,132")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(Within(0, 1024));
  command.add_flag("--graph", options.is_graph, "On GPUs also as replayed CUDA graphs");
  command.add_flag("--fp8", options.is_fp8, "On GPUs: dispatch FP8 rows with scales");
  command.add_flag("--copy-engines", options.is_copied, "On GPUs: copy engines carry the rows")
      ->excludes("--graph", "--staged");
  command.add_option("--mover", options.mover, "How a GPU moves rows")
      ->transform(Choice<Mover>(
          {{"auto", Mover::kAuto}, {"vector", Mover::kVector}, {"bulk", Mover::kBulk}},
          "auto|vector|bulk"
      ))
      ->default_str("auto");
}

void add_run_options(CLI::App& command, BenchOptions& options) {
  command.add_option("--threads-per-rank", options.threads_per_rank, "Workers of each rank")
      ->check(Within(0, kMostThreads))
      ->default_str("the cores shared among the ranks");
  add_transport_option(command, options.transport);
  command.add_flag("--staged", options.is_staged, "Output in ordinary memory, filled by a copy");
  add_number(command, "--iterations", options.iterations, 1, kMostSamples, "Samples");
  add_number(command, "--warmup", options.warmup, 0, kMostSamples, "Calls before the first sample");
  command.add_flag("!--no-check", options.is_checked, "Skip the comparison before timing");
  command.add_option("--json", options.json_path, "Write the results here");
  command.add_option("--html", options.html_path, "Write a page with plots here");
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("bench", "Time plan, dispatch and combine against the copying limit");
  auto options = std::make_shared<BenchOptions>();
  auto is_smoke = std::make_shared<bool>(false);
  auto reference = std::make_shared<std::string>();
  command->footer(kFooter);
  std::vector<std::string> names;
  for (const auto& [name, op] : kBenchOps) {
    names.emplace_back(name);
  }
  command->add_option("ops", options->ops, "plan, dispatch, combine, plan+dispatch; all of them")
      ->check(CLI::IsMember(names));
  add_rank_options(*command, options->ranks);
  add_case_options(*command, *options);
  add_run_options(*command, *options);
  add_gpu_options(*command, *options);
  command->add_option("--case", *reference, "Shape of a reference case: A, B, C or D")
      ->check(CLI::IsMember({"A", "B", "C", "D"}))
      ->excludes("--tokens", "--hidden", "--experts", "--topk", "--routing");
  command->add_flag("--smoke", *is_smoke, "Tiny and quick: does it run at all?")
      ->excludes("--case");
  command->callback([options, is_smoke, reference, command] {
    if (*is_smoke) {
      shrink(*command, *options);
    }
    if (!options->routing_file.empty() && command->count("--ranks") == 0 && !Group::is_launched()) {
      options->ranks.num_ranks = RoutingFileReader(options->routing_file).shape().num_ranks;
    }
    take_case(*options, *reference);
    check_outputs(
        {{"--json", options->json_path}, {"--html", options->html_path}},
        {{"--routing", options->routing_file}}
    );
    choose_device(options->device, options->transport);
    if (options->is_copied && !options->device.is_on_gpu()) {
      throw CLI::ValidationError("--copy-engines", "GPUs have them, and this would run on the CPU");
    }
    double limit_gbps = 0;
    if (options->device.is_on_gpu()) {
      limit_gbps = all_to_all_limit_gbps();
      take_all_gpus(*command, options->device, options->ranks);
    }
    if (options->routing_file.empty() && !Group::is_launched()) {
      options->made_up.num_ranks = options->ranks.num_ranks;
      check_made_up(options->made_up);
    }
    run_ranks(options->ranks, [&](Group& group) {
      return bench_rank(group, *options, limit_gbps);
    });
  });
}

}  // namespace weft::program
