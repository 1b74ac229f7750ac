// SPDX-License-Identifier: Apache-2.0
// `weft-lab train`: a small mixture-of-experts language model on any file; the options, and one
// rank of a run.
#include "train/command/command.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/choices.hpp"
#include "cli/program.hpp"
#include "cli/progress.hpp"
#include "cli/ranks.hpp"
#include "cli/stop_request.hpp"
#include "core/check.hpp"
#include "measure/limits.hpp"
#include "measure/measure.hpp"
#include "plan/file/routing_file.hpp"
#include "report/json_text.hpp"
#include "train/batch.hpp"
#include "train/checkpoint.hpp"
#include "train/config.hpp"
#include "train/trainer.hpp"
#include "weft/error.hpp"
#include "weft/group.hpp"
#include "weft/plan.hpp"

namespace weft::program {
namespace {

constexpr double kDefaultSeconds = 60;
constexpr int kOverlappedMicroBatches =
    4;  // a guess: more hide more, but compute in smaller pieces

struct TrainOptions {
  std::string text_path;
  moe::TrainConfig config;
  RankOptions ranks;
  int64_t steps = 0;   // in all, those of the checkpoint included; 0: no such limit
  double seconds = 0;  // of this run; 0: no such limit
  std::string checkpoint_path;
  int64_t checkpoint_every = 100;  // steps
  bool is_resumed = false;
  bool overwrites = false;  // a checkpoint that this run has not gone on from
  std::string routing_path;
  int64_t routing_every = 1;  // steps
  std::string trace_path;
  std::string html_path;
  std::string json_path;
};

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
        trainer_(group, options.config, text),
        record_{options.config.model},
        progress_("train", is_speaker_) {
    if (options.is_resumed) {
      trainer_.resume(options.checkpoint_path);
    }
    facts_ = {
        .text_path = options.text_path,
        .text_bytes = static_cast<int64_t>(text.size()),
        .config = options.config,
        .transport = trainer_.exchange().config().transport,
        .num_ranks = group.num_ranks(),
        .num_parameters = trainer_.num_parameters(),
        .num_active_parameters = trainer_.num_active_parameters(),
        .first_step = trainer_.steps_done()};
    open_routing_file();
  }

  // Collective. Trains until a limit is reached or `stop` is set, then saves and, on rank 0,
  // prints.
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
  [[nodiscard]] bool has_all_steps() const {
    return options_.steps > 0 && trainer_.steps_done() >= options_.steps;
  }

  // False after the last one. Ranks decide together, from what each told the others.
  bool step() {
    const moe::StepReport report = trainer_.step();
    RankStep mine = {report, overlap::lane_times(report.trace)};
    for (const double seconds : trainer_.exchange().stats().wait_seconds) {
      mine.wait_seconds = std::max(mine.wait_seconds, seconds);
    }
    const bool is_late = options_.seconds > 0 && watch_.seconds() >= options_.seconds;
    mine.wants_to_stop = stop_.is_set() || (is_speaker_ && is_late);
    const std::vector<RankStep> ranks = gather(group_, mine);
    if (is_speaker_) {
      record_.add(report, ranks);
      show_progress(report);
    }
    if (!options_.routing_path.empty() && report.step % options_.routing_every == 0) {
      save_routing(report.step);
    }
    const bool is_last = has_all_steps() || std::ranges::any_of(ranks, &RankStep::wants_to_stop);
    if (!options_.checkpoint_path.empty() && report.step % options_.checkpoint_every == 0 &&
        !is_last) {
      trainer_.save(options_.checkpoint_path);
    }
    return !is_last;
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

  // Collective.
  void save_routing(int64_t step) {
    for (int block = 0; block < options_.config.model.num_blocks; ++block) {
      std::vector<RouteTable> routes;
      for (const Bytes& bytes : group_.all_gather(std::as_bytes(trainer_.last_topk_idx(block)))) {
        RouteTable& table = routes.emplace_back();
        table.topk = options_.config.model.topk;
        table.expert.resize(bytes.size() / sizeof(int32_t));
        table.num_tokens = static_cast<int64_t>(table.expert.size()) / table.topk;
        std::ranges::copy(bytes, std::as_writable_bytes(std::span(table.expert)).begin());
      }
      if (is_speaker_) {
        routing_file_->append(step, block, routes);
      }
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

  // Rank 0 measures the limit of memory and reports while the others wait with idle
  // cores.
  void finish() {
    if (is_speaker_) {
      const moe::TrainConfig& config = options_.config;
      const int64_t row_bytes = config.model.hidden * dtype_bytes(config.dtype);
      facts_.rates = copy_rates({.num_ranks = group_.num_ranks(), .row_bytes = row_bytes});
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

constexpr const char* kFooter =
    R"(The model predicts the next byte of FILE. Its experts live across the ranks; tokens travel to them and
back only through Weft, forward and backward. The loss depends on the seed, not on the ranks.

Ctrl-C (or SIGTERM) finishes the step, saves and reports; a second one stops at once.

Examples:
  weft-lab train book.txt                                one minute on four ranks
  weft-lab train book.txt --steps 500 --html run.html    a page with loss curve and load per expert
  weft-lab train book.txt --checkpoint run.ckpt          saved every 100 steps, at the end, on Ctrl-C
  weft-lab train book.txt --checkpoint run.ckpt --resume --steps 1000
  weft-lab train book.txt --overlap --trace step.json    exchanges under computation; what ran when
  weft-lab train book.txt --save-routing steps.wrt       for `weft plan` and `weft bench --routing`
  mpirun -n 4 weft-lab train book.txt                    ranks started by a launcher)";

void add_limit_options(CLI::App& app, TrainOptions& options) {
  app.add_option("file", options.text_path, "Text to learn: any file")->required();
  app.add_option("--steps", options.steps, "Stop when so many steps are done in all")
      ->check(at_least_one());
  app.add_option("--seconds", options.seconds, "Stop after so long (default: 60 without --steps)")
      ->check(Within(1e-3, 1e9));
  add_rank_options(app, options.ranks);
}

void add_model_options(CLI::App& app, TrainOptions& options) {
  auto& config = options.config;
  auto& model = config.model;
  const auto add = [&](const char* name, auto& value, const char* text) {
    return app.add_option(name, value, text)->group("Model")->capture_default_str();
  };
  add("--window", model.window, "Bytes that predict the next one");
  add("--hidden", model.hidden, "Width of a token");
  add("--expert-hidden", model.expert_hidden, "Inner width of an expert");
  add("--blocks", model.num_blocks, "Blocks");
  add("--experts", model.num_experts, "Experts of a block, divisible by ranks");
  add("--topk", model.topk, "Experts of a token");
  add("--balance", model.balance_weight, "Weight of the load-balancing loss");
  add("--batch", config.global_batch, "Tokens of a step, of all ranks together");
  add("--learning-rate", config.learning_rate, "Learning rate");
  add("--warmup", config.warmup_steps, "Steps in which the learning rate rises");
  add("--seed", config.seed, "Seed of parameters and batches")->check(any_seed());
  add_value(app, "--transport", config.transport, "How rows travel, see `weft info`");
  app.add_option("--dtype", config.dtype, "Type of the rows that travel")
      ->transform(Choice<DType>(
          {{"fp32", DType::kFloat32},
           {"float32", DType::kFloat32},
           {"bf16", DType::kBFloat16},
           {"bfloat16", DType::kBFloat16}},
          "fp32|bf16"
      ))
      ->default_str("fp32")
      ->group("Model");
}

void add_replicas_option(CLI::App& app, TrainOptions& options) {
  constexpr const char* kReplicas =
      "Places on each rank for replicas of popular experts, planned for each micro-batch; same "
      "losses to rounding";
  app.add_option("--replicas", options.config.replicas, kReplicas)
      ->check(Within(0, kMostReplicas))
      ->default_str("0: none")
      ->group("Model");
}

void add_overlap_options(CLI::App& app, TrainOptions& options) {
  auto& config = options.config;
  app.add_option("--micro-batches", config.num_micro_batches, "Parts of a step")
      ->check(at_least_one())
      ->default_str(fmt::format("1, with --overlap {}", kOverlappedMicroBatches))
      ->group("Overlap");
  constexpr const char* kOverlap =
      "Run the forward of a micro-batch with the backward of the one before; same results";
  constexpr const char* kDelay =
      "Compute gradients of experts' weights where they hide an exchange; same results";
  auto* overlap = app.add_flag("--overlap", config.overlap.is_on, kOverlap)->group("Overlap");
  const auto needs_overlap = [&](CLI::Option* option) {
    return option->group("Overlap")->needs(overlap);
  };
  auto& delays = config.overlap.delays_weight_gradients;
  needs_overlap(app.add_flag("--delay-wgrad", delays, kDelay));
  constexpr const char* kTrace = "Write what ran when in the last step of rank 0";
  needs_overlap(app.add_option("--trace", options.trace_path, kTrace));
}

void add_file_options(CLI::App& app, TrainOptions& options) {
  const auto add = [&](const char* name, auto& value, const char* text) {
    return app.add_option(name, value, text)->group("Files");
  };
  auto* checkpoint = add("--checkpoint", options.checkpoint_path, "Keep the model here");
  add("--checkpoint-every", options.checkpoint_every, "Steps between two checkpoints")
      ->check(at_least_one())
      ->capture_default_str();
  auto* resume = app.add_flag("--resume", options.is_resumed, "Go on from the checkpoint")
                     ->group("Files")
                     ->needs(checkpoint);
  app.add_flag("--overwrite", options.overwrites, "Begin anew although the checkpoint holds steps")
      ->group("Files")
      ->needs(checkpoint)
      ->excludes(resume);
  add("--save-routing", options.routing_path, "Write the routing of the steps");
  add("--routing-every", options.routing_every, "Steps between two that are written")
      ->check(at_least_one())
      ->capture_default_str();
  add("--html", options.html_path, "Write a report page");
  add("--json", options.json_path, "Write the numbers");
}

// Throws CLI::ValidationError for files that the run would destroy, Error (kFile) for those that it
// could not write.
void check_files(const TrainOptions& options) {
  check_outputs(
      {{"--checkpoint", options.checkpoint_path},
       {"--save-routing", options.routing_path},
       {"--trace", options.trace_path},
       {"--html", options.html_path},
       {"--json", options.json_path}},
      {{"the text", options.text_path}}
  );
  const std::string& path = options.checkpoint_path;
  if (path.empty() || options.is_resumed || options.overwrites) {
    return;
  }
  const auto refuse = [&](std::string_view problem) {
    throw CLI::ValidationError(fmt::format(
        "--checkpoint {}: {} (--resume goes on from a checkpoint, --overwrite replaces it)",
        path,
        problem
    ));
  };
  std::optional<int64_t> steps;
  try {
    steps = moe::checkpoint_steps(path);
  } catch (const Error&) {
    refuse("it is there already and no checkpoint");
  }
  if (steps.value_or(0) > 0) {
    refuse(fmt::format("it holds {} steps", *steps));
  }
}

void run_train(const CLI::App& command, TrainOptions& options) {
  if (options.steps == 0 && options.seconds == 0) {
    options.seconds = kDefaultSeconds;
  }
  if (options.config.overlap.is_on && command.count("--micro-batches") == 0) {
    options.config.num_micro_batches = kOverlappedMicroBatches;
  }
  if (!Group::is_launched()) {
    try {
      moe::validate(options.config, options.ranks.num_ranks);
    } catch (const Error& error) {
      throw CLI::ValidationError(error.what());
    }
  }
  check_files(options);
  const auto text = moe::read_text(options.text_path, options.config.model.window);
  const StopRequest stop;
  run_ranks(options.ranks, [&](Group& group) {
    agree_on_options(group, options);
    TrainRun(group, options, text, stop).run();
    return 0;
  });
}

}  // namespace

void add_train(CLI::App& app) {
  auto* command = app.add_subcommand("train", "Train a small mixture-of-experts model on a file");
  command->footer(kFooter);
  auto options = std::make_shared<TrainOptions>();
  add_limit_options(*command, *options);
  add_model_options(*command, *options);
  add_overlap_options(*command, *options);
  add_replicas_option(*command, *options);
  add_file_options(*command, *options);
  command->callback([command, options] { run_train(*command, *options); });
}

}  // namespace weft::program
