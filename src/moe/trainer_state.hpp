// SPDX-License-Identifier: Apache-2.0
// What a trainer owns, and the parts of a step.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "moe/adamw.hpp"
#include "moe/batch.hpp"
#include "moe/checkpoint.hpp"
#include "moe/device_model.hpp"
#include "moe/parameters.hpp"
#include "moe/replicated_vector.hpp"
#include "moe/step_model.hpp"
#include "moe/trainer.hpp"

namespace weft::moe {

struct Trainer::State {
  State(const Group& the_group, const TrainConfig& the_config, std::span<const std::byte> the_text);

  // Forward and backward of this rank's tokens of the step.
  void compute_gradients();
  // Sums the gradients, lets each owner update its parameters, hands out what all ranks hold.
  void update(float learning_rate);
  [[nodiscard]] StepReport report(float learning_rate);

  [[nodiscard]] int64_t num_tokens() const;  // of this rank in a step

  // For checkpoints: what this rank owns, as it is now, and of which run.
  [[nodiscard]] std::vector<StatePiece> pieces();
  [[nodiscard]] CheckpointHeader header() const;

  [[nodiscard]] Parameter experts() { return {expert_values, expert_grads}; }
  void update_own(const AdamStep& adam);
  void broadcast();

  Group group;
  TrainConfig config;
  std::span<const std::byte> text;
  BatchSource source;
  std::vector<MicroBatch> micro_batches;  // of every step
  ModelLayout layout;
  Exchange exchange;
  ReplicatedVector replicated;  // the parameters, then the scalars of a step
  std::vector<float> expert_values;
  std::vector<float> expert_grads;
  AdamMoments own_moments;
  AdamMoments expert_moments;
  MoeContext context;
  std::unique_ptr<StepModel> model;
  DeviceModel* gpu = nullptr;  // the model if it is on a GPU, whose AdamW the experts have then
  std::vector<Batch> batches;
  int64_t steps_done = 0;
};

}  // namespace weft::moe
