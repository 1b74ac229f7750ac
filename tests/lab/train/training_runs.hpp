// SPDX-License-Identifier: Apache-2.0
// Small runs of the trainer on threads as ranks.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <string_view>
#include <vector>

#include "train/layers/random.hpp"
#include "train/trainer.hpp"

namespace weft::moe {

// Words in random order: something to learn, nothing to read.
inline std::vector<std::byte> make_text(size_t size) {
  constexpr std::string_view kWords[] = {
      "the ", "loom ", "carries ", "a ", "thread ", "across ", "and ", "back "};
  std::vector<std::byte> text;
  for (uint64_t i = 0; text.size() < size; ++i) {
    for (const char c : kWords[random_bits(1, 2, i) % std::size(kWords)]) {
      text.push_back(static_cast<std::byte>(c));
    }
  }
  return text;
}

inline TrainConfig small_config() {
  TrainConfig config;
  config.model = {
      .window = 4,
      .hidden = 16,
      .expert_hidden = 16,
      .num_blocks = 2,
      .num_experts = 8,
      .topk = 2,
      .balance_weight = 0.02F};
  config.global_batch = 67;  // does not divide
  config.seed = 5;
  config.learning_rate = 5e-3F;
  config.warmup_steps = 5;
  config.timeout = std::chrono::seconds(20);
  return config;
}

struct TrainingRun {
  std::vector<StepReport> reports;  // of rank 0
  uint64_t fingerprint = 0;
};

// `prepare` and `finish` run on every rank before and after the steps.
inline TrainingRun train(
    int num_ranks,
    const TrainConfig& config,
    int num_steps,
    const std::function<void(Trainer&)>& prepare = {},
    const std::function<void(Trainer&)>& finish = {}
) {
  const auto text = make_text(4000);
  TrainingRun run;
  run_threads(num_ranks, [&](Group& group) {
    Trainer trainer(group, config, text);
    if (prepare) {
      prepare(trainer);
    }
    for (int i = 0; i < num_steps; ++i) {
      const StepReport report = trainer.step();
      if (group.rank() == 0) {
        run.reports.push_back(report);
      }
    }
    const uint64_t fingerprint = trainer.fingerprint();
    if (group.rank() == 0) {
      run.fingerprint = fingerprint;
    }
    if (finish) {
      finish(trainer);
    }
  });
  return run;
}

}  // namespace weft::moe
