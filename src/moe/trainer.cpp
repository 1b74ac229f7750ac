// SPDX-License-Identifier: Apache-2.0
#include "moe/trainer.hpp"

#include <numeric>

#include "core/clock.hpp"
#include "moe/checkpoint.hpp"
#include "moe/together.hpp"
#include "moe/trainer_state.hpp"

namespace weft::moe {

Trainer::Trainer(const Group& group, const TrainConfig& config, std::span<const std::byte> text)
    : state_(std::make_unique<State>(group, config, text)) {}
Trainer::~Trainer() = default;
Trainer::Trainer(Trainer&&) noexcept = default;
Trainer& Trainer::operator=(Trainer&&) noexcept = default;

StepReport Trainer::step() {
  State& s = *state_;
  const auto begin = Clock::now();
  s.context.timer.reset();
  s.context.exchange_timer.reset();
  s.context.timer.start(Phase::kDense);
  s.context.dispatch = {};
  s.context.combine = {};
  s.replicated.reset_traffic();
  const float learning_rate = learning_rate_at(s.config, s.steps_done);
  s.compute_gradients();
  s.update(learning_rate);
  ++s.steps_done;
  s.context.timer.pause();
  const std::chrono::duration<double> wall = Clock::now() - begin;
  StepReport report = s.report(learning_rate);
  const auto& phases = report.phase_seconds;
  report.seconds =
      s.config.overlap.is_on ? wall.count() : std::reduce(phases.begin(), phases.end());
  return report;
}

void Trainer::save(const std::string& path) const {
  write_checkpoint(state_->group, path, state_->header(), state_->pieces());
}

void Trainer::resume(const std::string& path) {
  State& s = *state_;
  s.steps_done = read_checkpoint(s.group, path, s.header(), s.pieces());
  if (s.gpu != nullptr) {
    s.gpu->load_experts();
  }
  s.broadcast();
}

uint64_t Trainer::fingerprint() const {
  uint64_t own = 0;
  for (const StatePiece& piece : state_->pieces()) {
    own += checksum(piece.parts[0], piece.model_begin);
  }
  const auto parts = together(state_->group, [own] { return own; });
  return std::reduce(parts.begin(), parts.end());
}

const TrainConfig& Trainer::config() const {
  return state_->config;
}
int64_t Trainer::steps_done() const {
  return state_->steps_done;
}
int64_t Trainer::num_tokens() const {
  return state_->num_tokens();
}
const Exchange& Trainer::exchange() const {
  return state_->exchange;
}
int64_t Trainer::num_parameters() const {
  return static_cast<int64_t>(state_->layout.num_model);
}
int64_t Trainer::num_local_parameters() const {
  return static_cast<int64_t>(state_->layout.num_replicated + state_->layout.num_expert);
}
int64_t Trainer::num_active_parameters() const {
  const ModelConfig& model = state_->config.model;
  const int64_t expert = int64_t{3} * model.hidden * model.expert_hidden;
  const int64_t idle = int64_t{model.num_blocks} * (model.num_experts - model.topk) * expert;
  const int64_t unseen = int64_t{model.window} * (kNumBytes - 1) * model.hidden;
  return num_parameters() - idle - unseen;
}

std::span<const int32_t> Trainer::last_topk_idx(int block) const {
  return state_->model->topk_idx(block);
}
std::span<const float> Trainer::last_topk_weights(int block) const {
  return state_->model->weights(block);
}

}  // namespace weft::moe
