// SPDX-License-Identifier: Apache-2.0
#include "train/trainer.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/clock.hpp"
#include "core/log.hpp"
#include "train/batch.hpp"
#include "train/checkpoint.hpp"
#include "train/layers/linear.hpp"
#include "train/layers/parameters.hpp"
#include "train/replicated_vector.hpp"
#include "train/step_model.hpp"
#include "train/together.hpp"
#include "weft/overlap.hpp"

namespace weft::moe {
namespace {

// Sums over the ranks that ride behind the replicated parameters.
enum Scalar : size_t { kLossScalar, kBalanceScalar, kNumScalars };

const TrainConfig& checked(
    const Group& group, const TrainConfig& config, std::span<const std::byte> text
) {
  const auto signatures = together(group, [&] {
    validate(config, group.num_ranks());
    if (config.device.kind == Device::Kind::kCuda) {
      check_can_train_on_gpu(config.device.index);
    } else {
      check_blas();
    }
    WEFT_CHECK_ARG(
        Context{},
        text.size() > static_cast<size_t>(config.model.window),
        "train: text of {} B (more than the window of {} B)",
        text.size(),
        config.model.window
    );
    return signature(config) ^ checksum(text);
  });
  for (size_t rank = 1; rank < signatures.size(); ++rank) {
    WEFT_CHECK_ARG(
        (Context{group.rank(), group.num_ranks()}),
        signatures[rank] == signatures[0],
        "train: ranks 0 and {} have different configurations or texts (the same on every rank)",
        rank
    );
  }
  return config;
}

// Of any rank in a micro-batch.
int64_t most_tokens(const TrainConfig& config, int num_ranks) {
  int64_t most = 1;
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (const MicroBatch& micro_batch :
         make_micro_batches(config.global_batch, config.num_micro_batches, rank, num_ranks)) {
      most = std::max(most, micro_batch.tokens.size());
    }
  }
  return most;
}

ExchangeConfig exchange_config(const TrainConfig& config, const Group& group) {
  return {
      .hidden = config.model.hidden,
      .max_tokens = most_tokens(config, group.num_ranks()),
      .num_experts = config.model.num_experts,
      .max_topk = config.model.topk,
      .device = config.device,
      .transport = config.transport,
      .num_threads = config.num_threads,
      .copy_engines = uses_copy_engines(config, group),
      .timeout = config.timeout};
}

// Elements [begin, end) of the whole vector, cut to a slice that starts at `slice_begin`.
struct Cut {
  size_t begin;
  size_t end;
};
Cut cut(size_t begin, size_t end, size_t slice_begin, size_t slice_size) {
  const auto local = [&](size_t i) {
    return std::clamp(i, slice_begin, slice_begin + slice_size) - slice_begin;
  };
  return {local(begin), local(end)};
}

}  // namespace

bool uses_copy_engines(const TrainConfig& config, const Group& group) {
  if (!config.overlap.is_on || config.device.kind != Device::Kind::kCuda ||
      group.num_ranks() == 1 || group.topology().domains.size() > 1) {
    return false;
  }
  const CopyEngines choice = config.overlap.copy_engines;
  return choice == CopyEngines::kAuto
             ? overlap::overlapped_copies(config.model.hidden, group.num_ranks())
             : choice == CopyEngines::kAlways;
}

Exchange make_exchange(
    const ExchangeConfig& wanted, const std::function<Exchange(const ExchangeConfig&)>& make
) {
  try {
    return make(wanted);
  } catch (const Error& error) {  // the same code on every rank
    if (!wanted.copy_engines || error.code() != ErrorCode::kOutOfMemory) {
      throw;
    }
    log(LogLevel::kWarn, "train: no exchanges by copy engines: {}", error.what());
  }
  ExchangeConfig config = wanted;
  config.copy_engines = false;
  return make(config);
}

// What a trainer owns, and the parts of a step.
struct Trainer::State {
  State(const Group& the_group, const TrainConfig& the_config, std::span<const std::byte> the_text)
      : group(the_group),
        config(checked(the_group, the_config, the_text)),
        text(the_text),
        source(text, config.model.window, config.seed),
        micro_batches(make_micro_batches(
            config.global_batch, config.num_micro_batches, group.rank(), group.num_ranks()
        )),
        layout(make_layout(config.model, group.rank(), group.num_ranks())),
        exchange(make_exchange(
            exchange_config(config, group),
            [&](const ExchangeConfig& wanted) { return Exchange(group, wanted); }
        )),
        replicated(group, layout.num_replicated + kNumScalars, config),
        expert_values(layout.num_expert),
        expert_grads(layout.num_expert),
        own_moments(replicated.own().value.size()),
        expert_moments(layout.num_expert),
        context{exchange, config.model, config.dtype, config.global_batch, config.overlap.is_on},
        batches(micro_batches.size()) {
    initialise(layout.replicated(), config.seed, replicated.all().value);
    initialise(layout.experts(), config.seed, expert_values);
    const auto own = replicated.own().value;
    std::ranges::copy(
        replicated.all().value.subspan(replicated.own_begin(), own.size()), own.begin()
    );
    const ModelMemory memory = {replicated.all(), experts()};
    if (config.device.kind == Device::Kind::kCuda) {
      auto made = make_device_model(
          {group, context, micro_batches, config.overlap, layout, memory, expert_moments}
      );
      gpu = made.get();
      model = std::move(made);
    } else {
      model = std::make_unique<HostModel>(context, micro_batches, config.overlap, layout, memory);
    }
  }

  // Forward and backward of this rank's tokens of the step.
  void compute_gradients() {
    replicated.clear_grads();
    std::ranges::fill(expert_grads, 0.0F);
    for (size_t i = 0; i < batches.size(); ++i) {
      source.draw(steps_done, micro_batches[i].tokens, batches[i]);
    }
    const LossShare share = model->forward_backward(batches);
    const Parameter all = replicated.all();
    for (size_t i = 0; i < share.cross_entropy.size(); ++i) {
      const auto scalars = all.grad_of(i).subspan(layout.num_replicated);
      scalars[kLossScalar] = static_cast<float>(share.cross_entropy[i]);
      scalars[kBalanceScalar] = i == 0 ? static_cast<float>(share.balance) : 0.0F;
    }
  }
  // Sums the gradients, lets each owner update its parameters, hands out what all ranks hold.
  void update(float learning_rate) {
    const auto step = static_cast<float>(steps_done + 1);
    const AdamStep adam = {
        learning_rate,
        config.beta1,
        config.beta2,
        config.epsilon,
        config.weight_decay,
        1.0F - std::pow(config.beta1, step),
        1.0F - std::pow(config.beta2, step)};
    context.timer.start(Phase::kReduce);
    replicated.reduce();
    context.timer.start(Phase::kOptimizer);
    update_own(adam);
    if (gpu != nullptr) {
      gpu->update_experts(adam);
    } else {
      adamw_update(adam, expert_values, expert_grads, expert_moments, 0, expert_values.size());
    }
    context.timer.start(Phase::kReduce);
    broadcast();
  }

  [[nodiscard]] StepReport report(float learning_rate) {
    StepReport report;
    const auto scalars = replicated.all().value.subspan(layout.num_replicated);
    report.step = steps_done;
    report.loss = static_cast<double>(scalars[kLossScalar]);
    report.balance_loss = static_cast<double>(scalars[kBalanceScalar]);
    report.learning_rate = learning_rate;
    report.num_tokens = num_tokens();
    report.global_tokens = config.global_batch;
    std::ranges::transform(
        context.timer.seconds(),
        context.exchange_timer.seconds(),
        report.phase_seconds.begin(),
        std::plus<>()
    );
    report.trace = model->trace();
    report.dispatch = context.dispatch;
    report.combine = context.combine;
    report.reduce = replicated.traffic();
    for (int block = 0; block < config.model.num_blocks; ++block) {
      std::vector<int64_t> routes(static_cast<size_t>(config.model.num_experts));
      for (size_t i = 0; i < batches.size(); ++i) {
        const auto more = model->plan(i, block).global_routes_per_expert();
        std::ranges::transform(routes, more, routes.begin(), std::plus<>());
      }
      report.routes.insert(report.routes.end(), routes.begin(), routes.end());
    }
    return report;
  }

  // Of this rank in a step.
  [[nodiscard]] int64_t num_tokens() const {
    int64_t sum = 0;
    for (const MicroBatch& micro_batch : micro_batches) {
      sum += micro_batch.tokens.size();
    }
    return sum;
  }

  // For checkpoints: what this rank owns, as it is now, and of which run.
  [[nodiscard]] std::vector<StatePiece> pieces() {
    if (gpu != nullptr) {
      gpu->store_experts();
    }
    const auto part = [](std::span<float> values, AdamMoments& moments, size_t begin, size_t size) {
      return std::array<std::span<float>, 3>{
          values.subspan(begin, size),
          std::span(moments.mean).subspan(begin, size),
          std::span(moments.square).subspan(begin, size)};
    };
    const auto own = replicated.own().value;
    const Cut kept = cut(0, layout.num_replicated, replicated.own_begin(), own.size());
    std::vector<StatePiece> pieces = {
        {replicated.own_begin(), part(own, own_moments, kept.begin, kept.end)}};
    for (const ParameterSpan& span : layout.experts()) {
      pieces.push_back(
          {span.model_begin, part(expert_values, expert_moments, span.begin, span.size)}
      );
    }
    return pieces;
  }

  [[nodiscard]] CheckpointHeader header() const {
    return {
        .model = config.model,
        .global_batch = config.global_batch,
        .seed = config.seed,
        .dtype = config.dtype,
        .text_bytes = text.size(),
        .text_checksum = checksum(text),
        .num_elements = layout.num_model,
        .steps_done = steps_done};
  }

  [[nodiscard]] Parameter experts() { return {expert_values, expert_grads}; }
  void update_own(const AdamStep& adam) {
    const Parameter own = replicated.own();
    const size_t begin = replicated.own_begin();
    const Cut decayed = cut(0, layout.num_decayed, begin, own.value.size());
    const Cut gains = cut(layout.num_decayed, layout.num_replicated, begin, own.value.size());
    const Cut scalars =
        cut(layout.num_replicated, layout.num_replicated + kNumScalars, begin, own.value.size());
    AdamStep no_decay = adam;
    no_decay.weight_decay = 0;
    adamw_update(adam, own.value, own.grad, own_moments, decayed.begin, decayed.end);
    adamw_update(no_decay, own.value, own.grad, own_moments, gains.begin, gains.end);
    std::ranges::copy(
        own.grad.subspan(scalars.begin, scalars.end - scalars.begin),
        own.value.begin() + static_cast<std::ptrdiff_t>(scalars.begin)
    );
  }

  void broadcast() {
    replicated.broadcast();
    if (gpu != nullptr) {
      gpu->load_replicated();
    }
  }

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
