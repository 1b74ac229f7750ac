// SPDX-License-Identifier: Apache-2.0
// `weft limits`: what copying can reach on this machine.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cli/choices.hpp"
#include "cli/program.hpp"
#include "cli/progress.hpp"
#include "cli/ranks.hpp"
#include "core/check.hpp"
#include "core/gpu/devices.hpp"
#include "measure/limits.hpp"
#include "measure/limits_cuda.hpp"
#include "measure/measure.hpp"
#include "measure/results.hpp"
#include "report/html.hpp"
#include "report/svg.hpp"
#include "report/table.hpp"

namespace weft::program {
namespace {

constexpr int64_t kLargeBlock = 1 << 20;

struct LimitsOptions {
  DeviceChoice device;
  int num_gpus = 0;  // 0: all
  bool is_quick = false;
  std::string json_path;
  std::string html_path;
  int max_ranks = 0;
  CopyShape shape = {};
  std::vector<int64_t> row_bytes = {kLargeBlock, 512, 2048, 4096, 8192, 14336};
  double seconds = 0.1;
};

constexpr const char* kFooter =
    R"(On GPUs all send to all others at once, by copy engine and by stores, loads and bulk copies of so
many SMs; GB/s (1e9) leave each GPU.

On CPUs every rank reads its own private memory and writes into the shared memory of all ranks, as
dispatch does, without any bookkeeping; gather copies the same rows back, as combine reads them. GB/s
are of all ranks together; a byte read once and written once counts once.

Examples:
  weft limits                              the GPUs if there are any, else the CPU
  weft limits --html limits.html           with a plot of the rates of GPUs
  weft limits --device cpu                 1 to as many ranks as there are cores
  weft limits --ranks 4 --row-bytes 4096 --device cpu   one row size, up to four ranks at once)";

constexpr const char* kMeaning =
    "GB/s (1e9) that leave each GPU while all send to all others at once; the slowest GPU counts. "
    "Loads: what arrives at each.";

std::string summary(const GpuLinkLimits& limits, const std::string& gpu_name) {
  std::string text = fmt::format(
      "{} x {}; a copy inside one GPU reads and writes {:.0f} GB/s",
      limits.num_gpus,
      gpu_name,
      limits.local_copy.gbps()
  );
  if (limits.num_gpus < 2) {
    return text + "; with one GPU there are no links to measure";
  }
  return text +
         fmt::format(
             "; copy engines move {:.1f} GB/s out of each GPU, the limit of all percentages; a "
             "signal to a peer and back takes {:.2f} us",
             limits.copy_engine.gbps(),
             limits.signal_us
         );
}

// GB/s by SMs, a series for each way; all have the same numbers of SMs.
std::vector<Series> series_of(const GpuLinkLimits& limits) {
  std::vector<Series> series;
  for (const LinkRate& rate : limits.by_sms) {
    if (series.empty() || series.back().name != rate.way) {
      series.push_back({rate.way, {}, {}});
    }
    series.back().x.push_back(rate.sms);
    series.back().y.push_back(rate.gbps());
  }
  return series;
}

Table table_of(const std::vector<Series>& ways) {
  std::vector<std::string> header = {"SMs"};
  for (const Series& way : ways) {
    header.push_back(way.name);
  }
  Table table(header);
  for (size_t i = 0; i < ways.front().x.size(); ++i) {
    std::vector<std::string> cells = {fmt::format("{}", ways.front().x[i])};
    for (const Series& way : ways) {
      cells.push_back(fmt::format("{:.1f}", way.y[i]));
    }
    table.add_row(std::move(cells));
  }
  return table;
}

LineChart chart_of(std::vector<Series> ways, const LinkRate& copy_engine) {
  const std::vector<double> sms = ways.front().x;
  ways.push_back({copy_engine.way, sms, std::vector<double>(sms.size(), copy_engine.gbps())});
  LineChart chart = {"Bytes per second between GPUs", "SMs", "GB/s out of each GPU", ways};
  chart.is_log_x = true;
  chart.starts_at_zero = true;
  return chart;
}

ResultRow row_of(const LinkRate& rate, int num_gpus, double limit_gbps) {
  return {
      .op = "link",
      .executor = "cuda",
      .transport = num_gpus == 1 ? "loopback" : "peer",
      .ranks = num_gpus,
      .sms = rate.sms,
      .mode = rate.way,
      .us_p50 = rate.us_p50,
      .us_p99 = rate.us_p99,
      .wire_bytes = num_gpus == 1 ? 0 : rate.bytes * num_gpus,
      .logical_bytes = rate.bytes * num_gpus,
      .limit_us = limit_gbps > 0 ? rate.bytes / limit_gbps / 1e3 : 0,
      .checked = true};  // measuring throws where bytes arrive wrong
}

void save_json(const GpuLinkLimits& limits, const std::string& path) {
  const double limit_gbps = limits.copy_engine.gbps();
  std::vector<ResultRow> rows = {row_of(limits.local_copy, 1, 0)};
  if (limits.num_gpus > 1) {
    rows.push_back(row_of(limits.copy_engine, limits.num_gpus, limit_gbps));
  }
  for (const LinkRate& rate : limits.by_sms) {
    rows.push_back(row_of(rate, limits.num_gpus, limit_gbps));
  }
  if (limits.signal_us > 0) {
    rows.push_back(
        {.op = "signal",
         .executor = "cuda",
         .transport = "peer",
         .ranks = 2,
         .sms = 1,
         .mode = "there and back",
         .us_p50 = limits.signal_us,
         .us_p99 = limits.signal_us,
         .checked = true}
    );
  }
  save_results(path, rows, {.scatter = limit_gbps, .gather = limit_gbps});
}

// Measures, prints a table, writes the files.
void run_gpu_limits(const LimitsOptions& options) {
  const int num_found = options.device.num_gpus;
  WEFT_CHECK_ARG(
      Context{},
      options.num_gpus <= num_found,
      "limits: {} GPUs asked for (there are {})",
      options.num_gpus,
      num_found
  );
  const int num_gpus = options.num_gpus > 0 ? options.num_gpus : num_found;
  const GpuLinkLimits limits = measure_gpu_limits(num_gpus, options.is_quick);
  const std::string headline = summary(limits, list_gpus().gpus.front().name);
  const std::vector<Series> ways = series_of(limits);
  fmt::print("{}\n", headline);
  if (num_gpus > 1) {
    fmt::print("\n{}\n\n{}", kMeaning, table_of(ways).text());
  }
  if (!options.json_path.empty()) {
    save_json(limits, options.json_path);
  }
  if (!options.html_path.empty()) {
    Page page("Weft: limits");
    page.add_text(headline);
    if (num_gpus > 1) {
      page.add_text(kMeaning);
      page.add_table(table_of(ways));
      page.add_figure(
          svg(chart_of(ways, limits.copy_engine)), "Copy engines need no SMs: the level line."
      );
    }
    page.save(options.html_path);
  }
}

std::string block_text(int64_t bytes) {
  return bytes >= kLargeBlock ? bytes_text(static_cast<double>(bytes)) : count_text(bytes) + " B";
}

void run_cpu_limits(const LimitsOptions& options) {
  const int max_ranks = options.max_ranks > 0 ? options.max_ranks : std::max(2, num_usable_cores());
  Table table(
      columns("ranks|block|memcpy|streaming|gather|memcpy pinned|streaming pinned|gather pinned")
  );
  {
    Progress progress("limits");
    const double total = max_ranks * static_cast<double>(options.row_bytes.size());
    double done = 0;
    for (int num_ranks = 1; num_ranks <= max_ranks; ++num_ranks) {
      for (const int64_t row_bytes : options.row_bytes) {
        progress.update(done++ / total);
        CopyShape shape = options.shape;
        shape.num_ranks = num_ranks;
        shape.row_bytes = row_bytes;
        CopyRig rig(shape);
        std::vector<std::string> cells = {std::to_string(num_ranks), block_text(row_bytes)};
        for (const bool is_pinned : {false, true}) {
          for (const CopyMethod method :
               {CopyMethod::kMemcpy, CopyMethod::kStream, CopyMethod::kGather}) {
            const double gbps = rig.measure({method, is_pinned, options.seconds});
            cells.push_back(fmt::format("{:.1f}", gbps));
          }
        }
        table.add_row(std::move(cells));
      }
    }
  }
  fmt::print(
      "GB/s copied by all ranks together; {} usable cores, each row copied {} times\n\n{}",
      num_usable_cores(),
      options.shape.copies,
      table.text()
  );
}

void run_limits(LimitsOptions& options) {
  check_outputs({{"--json", options.json_path}, {"--html", options.html_path}});
  choose_device(options.device);
  if (options.device.is_on_gpu()) {
    run_gpu_limits(options);
    return;
  }
  if (!options.json_path.empty() || !options.html_path.empty()) {
    throw CLI::ValidationError("--json and --html", "only the limits of GPUs are written to files");
  }
  run_cpu_limits(options);
}

}  // namespace

void add_limits(CLI::App& app) {
  CLI::App* command = app.add_subcommand("limits", "What copying can reach on this machine");
  auto options = std::make_shared<LimitsOptions>();
  command->footer(kFooter);
  add_device_option(*command, options->device);
  command->add_option("--gpus", options->num_gpus, "GPUs that take part")
      ->check(Within(1, 32))
      ->default_str("all");
  command->add_flag("--quick", options->is_quick, "Few SM counts, small blocks");
  command->add_option("--json", options->json_path, "Write the rates of GPUs here");
  command->add_option("--html", options->html_path, "Write a page with a plot of GPUs' rates here");
  command->add_option("--ranks", options->max_ranks, "Most ranks that copy at once")
      ->check(Within(1, kMostRanks))
      ->default_str("the usable cores, at least 2");
  command
      ->add_option(
          "--threads-per-rank", options->shape.threads_per_rank, "Copying threads of a rank"
      )
      ->check(Within(1, kMostThreads))
      ->default_str("the usable cores shared among the ranks");
  command->add_option("--row-bytes", options->row_bytes, "Bytes of one copy, a multiple of 16")
      ->check(Within(int64_t{16}, int64_t{64} << 20))
      ->delimiter(',')
      ->capture_default_str();
  add_number(
      *command,
      "--source-bytes",
      options->shape.source_bytes,
      int64_t{1} << 10,
      int64_t{1} << 30,
      "Private memory of a rank"
  );
  add_number(*command, "--copies", options->shape.copies, 1, 32, "Times each row is copied");
  add_number(*command, "--seconds", options->seconds, 0.001, 10.0, "Time for each number");
  command->callback([options] { run_limits(*options); });
}

}  // namespace weft::program
