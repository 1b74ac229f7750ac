// SPDX-License-Identifier: Apache-2.0
// `weft limits`: what copying can reach on this machine.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "choices.hpp"
#include "commands.hpp"
#include "core/devices.hpp"
#include "gpu_limits.hpp"
#include "limits.hpp"
#include "measure.hpp"
#include "progress.hpp"
#include "table.hpp"

namespace weft::program {
namespace {

constexpr int64_t kLargeBlock = 1 << 20;

struct LimitsOptions {
  std::string device = "auto";
  GpuLimitsOptions gpu = {};
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

std::string block_text(int64_t bytes) {
  return bytes >= kLargeBlock ? bytes_text(static_cast<double>(bytes)) : count_text(bytes) + " B";
}

std::string gbps_text(CopyRig& rig, const CopySettings& settings) {
  return fmt::format("{:.1f}", rig.measure(settings));
}

void run_cpu_limits(const LimitsOptions& options) {
  const int max_ranks = options.max_ranks > 0 ? options.max_ranks : std::max(2, num_usable_cores());
  Table table(
      {"ranks",
       "block",
       "memcpy",
       "streaming",
       "gather",
       "memcpy pinned",
       "streaming pinned",
       "gather pinned"}
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
            cells.push_back(gbps_text(rig, {method, is_pinned, options.seconds}));
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

void run_limits(const LimitsOptions& options) {
  if (options.device == "cuda" || (options.device == "auto" && !list_gpus().gpus.empty())) {
    run_gpu_limits(options.gpu);
    return;
  }
  if (!options.gpu.json_path.empty() || !options.gpu.html_path.empty()) {
    throw CLI::ValidationError("--json and --html", "only the limits of GPUs are written to files");
  }
  run_cpu_limits(options);
}

void add_gpu_options(CLI::App& command, LimitsOptions& options) {
  command.add_option("--device", options.device, "auto, cpu or cuda; auto: GPUs if there are any")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command.add_option("--gpus", options.gpu.num_gpus, "GPUs that take part")
      ->check(CLI::Range(1, 32))
      ->default_str("all");
  command.add_flag("--quick", options.gpu.is_quick, "Few SM counts, small blocks");
  command.add_option("--json", options.gpu.json_path, "Write the rates of GPUs here");
  command.add_option("--html", options.gpu.html_path, "Write a page with a plot here");
}

}  // namespace

void add_limits(CLI::App& app) {
  CLI::App* command = app.add_subcommand("limits", "What copying can reach on this machine");
  auto options = std::make_shared<LimitsOptions>();
  command->footer(kFooter);
  add_gpu_options(*command, *options);
  command->add_option("--ranks", options->max_ranks, "Most ranks that copy at once")
      ->check(CLI::Range(1, 64))
      ->default_str("the usable cores, at least 2");
  command
      ->add_option(
          "--threads-per-rank", options->shape.threads_per_rank, "Copying threads of a rank"
      )
      ->check(CLI::Range(1, 256))
      ->default_str("the usable cores shared among the ranks");
  command->add_option("--row-bytes", options->row_bytes, "Bytes of one copy, a multiple of 16")
      ->check(CLI::Range(int64_t{16}, int64_t{64} << 20))
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--source-bytes", options->shape.source_bytes, "Private memory of a rank")
      ->check(CLI::Range(int64_t{1} << 10, int64_t{1} << 30))
      ->capture_default_str();
  command->add_option("--copies", options->shape.copies, "Times each row is copied")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  command->add_option("--seconds", options->seconds, "Time for each number")
      ->check(CLI::Range(0.001, 10.0))
      ->check(Finite())
      ->capture_default_str();
  command->callback([options] { run_limits(*options); });
}

}  // namespace weft::program
