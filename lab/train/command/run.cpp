// SPDX-License-Identifier: Apache-2.0
#include "train/command/run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/progress.hpp"
#include "core/check.hpp"
#include "group/control_plane.hpp"
#include "measure/limits.hpp"
#include "measure/measure.hpp"
#include "plan/file/routing_file.hpp"
#include "report/json_text.hpp"
#include "train/command/report.hpp"
#include "train/trainer.hpp"

namespace weft::program {
namespace {

// Collective. Throws Error (kInvalidArgument) on every rank where options differ that decide what
// ranks say to each other between two steps; the model's are compared where it is made. Ranks that
// a launcher starts have each their own command line.
void agree_on_options(const Group& group, const TrainOptions& options) {
  constexpr std::array kNames = {
      "--steps",
      "--resume",
      "--checkpoint-every (with --checkpoint)",
      "--routing-every (with --save-routing)"};
  const std::array<int64_t, kNames.size()> mine = {
      options.steps,
      options.is_resumed,
      options.checkpoint_path.empty() ? 0 : options.checkpoint_every,
      options.routing_path.empty() ? 0 : options.routing_every};
  const auto ranks = gather(group, mine);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (size_t i = 0; i < mine.size(); ++i) {
      WEFT_CHECK_ARG(
          (Context{group.rank(), group.num_ranks()}),
          ranks[rank][i] == mine[i],
          "train: {} = {} here and {} on rank {} (0: not given; must be equal on all ranks)",
          kNames[i],
          mine[i],
          ranks[rank][i],
          rank
      );
    }
  }
}

constexpr double kReportSeconds = 15;  // between two versions of the page

moe::TrainConfig config_of_rank(const TrainOptions& options, int rank) {
  moe::TrainConfig config = options.config;
  config.device = options.device.device(rank);
  return config;
}

class TrainRun {
 public:
  TrainRun(
      const Group& group,
      const TrainOptions& options,
      std::span<const std::byte> text,
      const StopRequest& stop
  )
      : group_(group),
        options_(options),
        stop_(stop),
        is_speaker_(group.rank() == 0),
        trainer_(group, config_of_rank(options, group.rank()), text),
        record_{
            options.config.model,
            options.config.num_micro_batches,
            options.config.model.hidden * dtype_bytes(options.config.dtype)},
        progress_("train", is_speaker_) {
    if (options.is_resumed) {
      trainer_.resume(options.checkpoint_path);
    }
    facts_ = {
        .text_path = options.text_path,
        .text_bytes = static_cast<int64_t>(text.size()),
        .config = options.config,
        .transport = trainer_.exchange().config().transport,
        .num_gpus = is_on_gpu() ? std::min(options.device.num_gpus, group.num_ranks()) : 0,
        .is_copied = trainer_.exchange().config().copy_engines,
        .num_ranks = group.num_ranks(),
        .num_parameters = trainer_.num_parameters(),
        .num_active_parameters = trainer_.num_active_parameters(),
        .first_step = trainer_.steps_done()};
    open_routing_file();
  }

  void run() {
    if (is_speaker_) {
      fmt::print("{}", train_headline(facts_));
      std::fflush(stdout);
    }
    bool goes_on = !has_all_steps();
    while (goes_on) {
      goes_on = step();
    }
    if (!options_.checkpoint_path.empty()) {
      trainer_.save(options_.checkpoint_path);
    }
    finish();
  }

 private:
  [[nodiscard]] bool is_on_gpu() const { return options_.device.is_on_gpu(); }
  [[nodiscard]] bool has_all_steps() const {
    return options_.steps > 0 && trainer_.steps_done() >= options_.steps;
  }

  // False after the last one. Ranks decide together, from what each told the others.
  bool step() {
    const moe::StepReport report = trainer_.step();
    RankStep mine = RankStep::from(report);
    for (const double seconds : trainer_.exchange().stats().wait_seconds) {
      mine.wait_seconds = std::max(mine.wait_seconds, seconds);
    }
    const bool is_late = options_.seconds > 0 && watch_.seconds() >= options_.seconds;
    mine.wants_to_stop = stop_.is_set() || (is_speaker_ && is_late);
    const bool saves_routing =
        !options_.routing_path.empty() && report.step % options_.routing_every == 0;
    const auto blocks = group_.all_gather(message(mine, saves_routing));
    std::vector<RankStep> ranks(blocks.size());
    for (size_t i = 0; i < blocks.size(); ++i) {
      ranks[i] = block_value<RankStep>(blocks[i], i, {group_.rank(), group_.num_ranks()});
    }
    if (is_speaker_) {
      record_.add(report, ranks);
      if (saves_routing) {
        save_routing(report.step, blocks);
      }
      show_progress(report);
    }
    const bool is_last = has_all_steps() || std::ranges::any_of(ranks, &RankStep::wants_to_stop);
    if (!options_.checkpoint_path.empty() && report.step % options_.checkpoint_every == 0 &&
        !is_last) {
      trainer_.save(options_.checkpoint_path);
    }
    return !is_last;
  }

  // RankStep, then the experts of each block's routes if the routing is saved.
  [[nodiscard]] Bytes message(const RankStep& mine, bool with_routing) const {
    Bytes bytes(sizeof(RankStep));
    std::memcpy(bytes.data(), &mine, sizeof(RankStep));
    for (int block = 0; with_routing && block < options_.config.model.num_blocks; ++block) {
      const auto experts = std::as_bytes(trainer_.last_topk_idx(block));
      bytes.insert(bytes.end(), experts.begin(), experts.end());
    }
    return bytes;
  }

  void open_routing_file() {
    if (!is_speaker_ || options_.routing_path.empty()) {
      return;
    }
    const auto& model = options_.config.model;
    const RoutingFileShape shape = {group_.num_ranks(), model.num_experts, model.topk};
    using Mode = RoutingFileWriter::Mode;
    routing_file_.emplace(
        options_.routing_path, shape, options_.is_resumed ? Mode::kContinue : Mode::kNew
    );
  }

  void save_routing(int64_t step, const std::vector<Bytes>& blocks) {
    const auto& model = options_.config.model;
    for (int block = 0; block < model.num_blocks; ++block) {
      std::vector<RouteTable> routes;
      for (const Bytes& bytes : blocks) {
        const size_t layer_bytes =
            (bytes.size() - sizeof(RankStep)) / static_cast<size_t>(model.num_blocks);
        RouteTable table;
        table.topk = model.topk;
        table.expert.resize(layer_bytes / sizeof(int32_t));
        table.num_tokens = static_cast<int64_t>(table.expert.size()) / model.topk;
        const std::byte* from =
            bytes.data() + sizeof(RankStep) + static_cast<size_t>(block) * layer_bytes;
        if (layer_bytes > 0) {
          std::memcpy(table.expert.data(), from, layer_bytes);
        }
        routes.push_back(std::move(table));
      }
      routing_file_->append(step, block, routes);
    }
  }

  void show_progress(const moe::StepReport& report) {
    const double by_time = options_.seconds > 0 ? watch_.seconds() / options_.seconds : 0;
    const double to_do = static_cast<double>(options_.steps - facts_.first_step);
    const double by_steps =
        options_.steps > 0 ? static_cast<double>(report.step - facts_.first_step) / to_do : 0;
    progress_.update(
        std::max(by_time, by_steps),
        fmt::format("step {}, loss {:.4f}", report.step, record_.recent_loss())
    );
    if (report_watch_.seconds() > kReportSeconds) {
      report_watch_ = {};
      write_reports();
    }
  }

  void write_reports() const {
    if (!options_.trace_path.empty()) {
      overlap::write_trace(options_.trace_path, record_.trace);
    }
    if (!options_.html_path.empty()) {
      train_page(facts_, record_).save(options_.html_path);
    }
    if (!options_.json_path.empty()) {
      save_json(options_.json_path, train_json(facts_, record_));
    }
  }

  // Rank 0 measures the limit (of a host's memory) and reports while the others wait with idle
  // cores.
  void finish() {
    if (is_speaker_) {
      if (!is_on_gpu()) {
        facts_.rates = copy_rates(group_.num_ranks(), record_.row_bytes);
      }
      progress_.clear();
      print_result();
      std::fflush(stdout);
      write_reports();
    }
    group_.barrier();
  }

  void print_result() const {
    if (record_.num_steps == 0) {
      fmt::print("Nothing to do: {} steps are done already\n", trainer_.steps_done());
      return;
    }
    fmt::print(
        "{}{} after step {}, {} a step, loss {:.4f}\n",
        train_text(facts_, record_),
        stop_.is_set() ? "Stopped by a signal" : "Done",
        record_.last_step,
        seconds_text(record_.per_step(record_.seconds)),
        record_.recent_loss()
    );
    for (const auto& [what, path] :
         {std::pair{"Checkpoint", &options_.checkpoint_path},
          std::pair{"Routing", &options_.routing_path},
          std::pair{"Trace", &options_.trace_path},
          std::pair{"Report", &options_.html_path},
          std::pair{"Numbers", &options_.json_path}}) {
      if (!path->empty()) {
        fmt::print("{}: {}\n", what, *path);
      }
    }
  }

  const Group& group_;
  const TrainOptions& options_;
  const StopRequest& stop_;
  bool is_speaker_;
  moe::Trainer trainer_;
  TrainFacts facts_;
  TrainRecord record_;
  Progress progress_;
  Stopwatch watch_;
  Stopwatch report_watch_;
  std::optional<RoutingFileWriter> routing_file_;
};

}  // namespace

int train_on_rank(
    const Group& group,
    const TrainOptions& options,
    std::span<const std::byte> text,
    const StopRequest& stop
) {
  agree_on_options(group, options);
  TrainRun run(group, options, text, stop);
  run.run();
  return 0;
}

}  // namespace weft::program
