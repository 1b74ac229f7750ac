// SPDX-License-Identifier: Apache-2.0
// `weft-lab train`: a small mixture-of-experts language model on any file.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <memory>
#include <string>

#include "cli/choices.hpp"
#include "cli/stop_request.hpp"
#include "lab_commands.hpp"
#include "train/batch.hpp"
#include "train/command/run.hpp"
#include "weft/error.hpp"

namespace weft::program {
namespace {

constexpr double kDefaultSeconds = 60;
constexpr int kOverlappedMicroBatches =
    4;  // a guess: more hide more, but compute in smaller pieces

constexpr const char* kFooter =
    R"(The model predicts the next byte of FILE. Its experts live across the ranks; tokens travel to them and
back only through Weft, forward and backward. The loss depends on the seed, not on the ranks.
Where there are GPUs the model is on them, in bf16: rank r on GPU r modulo their number.

Ctrl-C (or SIGTERM) finishes the step, saves and reports; a second one stops at once.

Examples:
  weft-lab train book.txt                                one minute on four ranks
  weft-lab train book.txt --steps 500 --html run.html    a page with loss curve and load per expert
  weft-lab train book.txt --checkpoint run.ckpt          saved every 100 steps, at the end, on Ctrl-C
  weft-lab train book.txt --checkpoint run.ckpt --resume --steps 1000
  weft-lab train book.txt --device cpu                   on the cores, in fp32, although there are GPUs
  weft-lab train book.txt --overlap --trace step.json    exchanges under computation; what ran when
  weft-lab train book.txt --save-routing steps.wrt       for `weft plan` and `weft bench --routing`
  mpirun -n 4 weft-lab train book.txt                    ranks started by a launcher)";

void add_limit_options(CLI::App& app, TrainOptions& options) {
  app.add_option("file", options.text_path, "Text to learn: any file")->required();
  app.add_option("--steps", options.steps, "Stop when so many steps are done in all")
      ->check(Positive());
  app.add_option("--seconds", options.seconds, "Stop after so long (default: 60 without --steps)")
      ->check(Positive());
  add_rank_options(app, options.ranks);
}

void add_model_options(CLI::App& app, TrainOptions& options) {
  auto& config = options.config;
  auto& model = config.model;
  const auto add = [&](const char* name, auto& value, const char* text) {
    app.add_option(name, value, text)->group("Model")->capture_default_str();
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
  add("--seed", config.seed, "Seed of parameters and batches");
  add_value(app, "--transport", config.transport, "How rows travel, see `weft info`");
}

void add_device_options(CLI::App& command, TrainOptions& options) {
  add_device_option(command, options.device);
  command.add_option("--dtype", options.config.dtype, "Type of the rows that travel")
      ->transform(Choice<DType>(
          {{"fp32", DType::kFloat32},
           {"float32", DType::kFloat32},
           {"bf16", DType::kBFloat16},
           {"bfloat16", DType::kBFloat16}},
          "fp32|bf16"
      ))
      ->default_str("fp32, on GPUs bf16")
      ->group("Model");
}

void add_overlap_options(CLI::App& app, TrainOptions& options) {
  auto& config = options.config;
  app.add_option("--micro-batches", config.num_micro_batches, "Parts of a step")
      ->check(Positive())
      ->default_str(fmt::format("1, with --overlap {}", kOverlappedMicroBatches))
      ->group("Overlap");
  auto* overlap = app.add_flag(
      "--overlap",
      config.overlap.is_on,
      "Run the forward of a micro-batch with the backward of the one before; same results"
  );
  overlap->group("Overlap");
  app.add_flag(
         "--delay-wgrad",
         config.overlap.delays_weight_gradients,
         "Compute gradients of experts' weights where they hide an exchange; same results"
  )
      ->group("Overlap")
      ->needs(overlap);
  app.add_option(
         "--exchange-copies",
         config.overlap.copy_engines,
         "On GPUs: copy engines carry what is exchanged beside computation; same results"
  )
      ->transform(copies_choice())
      ->default_str("auto: as measured, or as WEFT_COPY_ENGINES says")
      ->group("Overlap")
      ->needs(overlap);
  app.add_option("--trace", options.trace_path, "Write what ran when in the last step of rank 0")
      ->group("Overlap")
      ->needs(overlap);
}

void add_file_options(CLI::App& app, TrainOptions& options) {
  const auto add = [&](const char* name, auto& value, const char* text) {
    return app.add_option(name, value, text)->group("Files");
  };
  auto* checkpoint = add("--checkpoint", options.checkpoint_path, "Keep the model here");
  add("--checkpoint-every", options.checkpoint_every, "Steps between two checkpoints")
      ->check(Positive())
      ->capture_default_str();
  app.add_flag("--resume", options.is_resumed, "Go on from the checkpoint")
      ->group("Files")
      ->needs(checkpoint);
  add("--save-routing", options.routing_path, "Write the routing of the steps");
  add("--routing-every", options.routing_every, "Steps between two that are written")
      ->check(Positive())
      ->capture_default_str();
  add("--html", options.html_path, "Write a report page");
  add("--json", options.json_path, "Write the numbers");
}

// Settles the device and what follows from it: bf16 on GPUs, and ranks as threads where several
// share one. `command` knows what the user said in words. CUDA stays untouched in this process.
void choose_devices(const CLI::App& command, TrainOptions& options) {
  const bool has_dtype = command.count("--dtype") > 0;
  if (has_dtype && options.config.dtype != DType::kBFloat16 && options.device.wanted == "auto") {
    options.device.wanted = "cpu";  // GPUs have no answer to it
  }
  choose_device(options.device, options.config.transport);
  if (!options.device.is_on_gpu()) {
    return;
  }
  options.config.device = options.device.device(0);
  if (!has_dtype) {
    options.config.dtype = DType::kBFloat16;
  }
  if (command.count("--processes") == 0) {
    options.ranks = with_ranks(options.ranks, options.device, options.ranks.num_ranks);
  }
}

void run_train(const CLI::App& command, TrainOptions& options) {
  if (options.steps == 0 && options.seconds == 0) {
    options.seconds = kDefaultSeconds;
  }
  if (options.config.overlap.is_on && command.count("--micro-batches") == 0) {
    options.config.num_micro_batches = kOverlappedMicroBatches;
  }
  choose_devices(command, options);
  if (!Group::is_launched()) {
    try {
      moe::validate(options.config, options.ranks.num_ranks);
    } catch (const Error& error) {
      throw CLI::ValidationError(error.what());
    }
  }
  const auto text = moe::read_text(options.text_path, options.config.model.window);
  const StopRequest stop;
  run_ranks(options.ranks, [&](Group& group) { return train_on_rank(group, options, text, stop); });
}

}  // namespace

void add_train(CLI::App& app) {
  auto* command = app.add_subcommand("train", "Train a small mixture-of-experts model on a file");
  command->footer(kFooter);
  auto options = std::make_shared<TrainOptions>();
  add_limit_options(*command, *options);
  add_model_options(*command, *options);
  add_device_options(*command, *options);
  add_overlap_options(*command, *options);
  add_file_options(*command, *options);
  command->callback([command, options] { run_train(*command, *options); });
}

}  // namespace weft::program
