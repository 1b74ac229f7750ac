// SPDX-License-Identifier: Apache-2.0
#include "train/trainer.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/available_memory.hpp"
#include "core/check.hpp"
#include "core/clock.hpp"
#include "core/log.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"
#include "weft/overlap.hpp"

namespace weft::moe {
namespace {

// Sums over the ranks that ride behind the replicated parameters.
enum Scalar : size_t { kLossScalar, kBalanceScalar, kNumScalars };

// Returns the bytes that a rank allocates on the host at least: parameters and AdamW's moments, the
// gradients of each shard, and what a token meets in a block. They are doubles, as the numbers come
// from outside.
double least_memory(const TrainConfig& config, int num_ranks) {
  const ModelConfig& model = config.model;
  const ModelLayout layout = make_layout(model, 0, num_ranks);
  const auto shards = static_cast<double>(shards_of_rank(0, num_ranks).size());
  const auto tokens = static_cast<double>(config.global_batch) / num_ranks;
  const double of_token = 6.0 * model.hidden + 2.0 * model.num_experts;
  const double of_route = 2.0 * model.hidden + 6.0 * model.expert_hidden;
  return sizeof(float) * (static_cast<double>(layout.num_replicated) * (2 + shards) +
                          static_cast<double>(layout.num_expert) * 4 +
                          tokens * model.num_blocks * (of_token + of_route * model.topk));
}

const TrainConfig& checked(
    const Group& group, const TrainConfig& config, std::span<const std::byte> text
) {
  agree(group, [&] {
    validate(config, group.num_ranks());
    const auto& own = group.topology().domains;
    const size_t here = own.size() == 1 ? static_cast<size_t>(group.num_ranks()) : 1;
    const double bytes = least_memory(config, group.num_ranks()) * static_cast<double>(here);
    check_available(
        bytes < 0x1p63 ? static_cast<uint64_t>(bytes) : kUnknownBytes - 1,
        fmt::format("a model on {} ranks", here)
    );
    check_blas();
    WEFT_CHECK_ARG(
        Context{},
        text.size() > static_cast<size_t>(config.model.window),
        "train: text of {} B (more than the window of {} B)",
        text.size(),
        config.model.window
    );
  });
  const auto signatures = gather_values(group, signature(config) ^ checksum(text));
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

// Returns the most tokens that any rank has in a micro-batch, at least 1.
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
      .transport = config.transport,
      .num_threads = config.num_threads,
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

Trainer::Trainer(const Group& group, const TrainConfig& config, std::span<const std::byte> text)
    : group_(group),
      config_(checked(group, config, text)),
      text_(text),
      source_(text, config.model.window, config.seed),
      micro_batches_(make_micro_batches(
          config.global_batch, config.num_micro_batches, group.rank(), group.num_ranks()
      )),
      layout_(make_layout(config.model, group.rank(), group.num_ranks())),
      exchange_(group_, exchange_config(config, group)),
      replica_exchange_(make_replica_exchange(group_, config_)),
      replicated_(group_, layout_.num_replicated + kNumScalars, config_),
      expert_values_(layout_.num_expert),
      expert_grads_(layout_.num_expert),
      own_moments_(replicated_.own().value.size()),
      expert_moments_(layout_.num_expert),
      context_{
          exchange_,
          config_.model,
          config.dtype,
          config.global_batch,
          config.overlap.is_on,
          config.replicas,
          replica_exchange_ ? &*replica_exchange_ : nullptr},
      batches_(micro_batches_.size()) {
  initialise(layout_.replicated(), config_.seed, replicated_.all().value);
  initialise(layout_.experts(), config_.seed, expert_values_);
  const auto own = replicated_.own().value;
  std::ranges::copy(
      replicated_.all().value.subspan(replicated_.own_begin(), own.size()), own.begin()
  );
  model_ = std::make_unique<StepModel>(StepModelParts{
      group_,
      context_,
      micro_batches_,
      config_.overlap,
      layout_,
      {replicated_.all(), {expert_values_, expert_grads_}},
      &expert_moments_});
}

StepReport Trainer::step() {
  const auto begin = Clock::now();
  context_.timer = {};
  context_.exchange_timer = {};
  context_.timer.start(Phase::kDense);
  context_.dispatch = {};
  context_.combine = {};
  compute_gradients();
  update();
  ++steps_done_;
  context_.timer.pause();
  const std::chrono::duration<double> wall = Clock::now() - begin;
  StepReport report = make_report();
  const auto& phases = report.phase_seconds;
  report.seconds = config_.overlap.is_on ? wall.count() : std::reduce(phases.begin(), phases.end());
  return report;
}

// Forward and backward of this rank's tokens of the step.
void Trainer::compute_gradients() {
  replicated_.clear_grads();
  std::ranges::fill(expert_grads_, 0.0F);
  for (size_t i = 0; i < batches_.size(); ++i) {
    source_.draw(steps_done_, micro_batches_[i].tokens, batches_[i]);
  }
  const LossShare share = model_->forward_backward(batches_);
  const Parameter all = replicated_.all();
  for (size_t i = 0; i < share.cross_entropy.size(); ++i) {
    const auto scalars = all.grad_of(i).subspan(layout_.num_replicated);
    scalars[kLossScalar] = static_cast<float>(share.cross_entropy[i]);
    scalars[kBalanceScalar] = i == 0 ? static_cast<float>(share.balance) : 0.0F;
  }
}

// Sums the gradients, lets each owner update its parameters, hands out what all ranks hold.
void Trainer::update() {
  const auto step = static_cast<float>(steps_done_ + 1);
  const AdamStep adam = {
      learning_rate_at(config_, steps_done_),
      config_.beta1,
      config_.beta2,
      config_.epsilon,
      config_.weight_decay,
      1.0F - std::pow(config_.beta1, step),
      1.0F - std::pow(config_.beta2, step)};
  context_.timer.start(Phase::kReduce);
  replicated_.reduce();
  context_.timer.start(Phase::kOptimizer);
  update_own(adam);
  model_->update_experts(adam);
  context_.timer.start(Phase::kReduce);
  replicated_.broadcast();
}

void Trainer::update_own(const AdamStep& adam) {
  const Parameter own = replicated_.own();
  const size_t begin = replicated_.own_begin();
  const Cut decayed = cut(0, layout_.num_decayed, begin, own.value.size());
  const Cut gains = cut(layout_.num_decayed, layout_.num_replicated, begin, own.value.size());
  const Cut scalars =
      cut(layout_.num_replicated, layout_.num_replicated + kNumScalars, begin, own.value.size());
  AdamStep no_decay = adam;
  no_decay.weight_decay = 0;
  adamw_update(adam, own.value, own.grad, own_moments_, decayed.begin, decayed.end);
  adamw_update(no_decay, own.value, own.grad, own_moments_, gains.begin, gains.end);
  std::ranges::copy(
      own.grad.subspan(scalars.begin, scalars.end - scalars.begin),
      own.value.begin() + static_cast<std::ptrdiff_t>(scalars.begin)
  );
}

StepReport Trainer::make_report() {
  StepReport report;
  const auto scalars = replicated_.all().value.subspan(layout_.num_replicated);
  report.step = steps_done_;
  report.loss = static_cast<double>(scalars[kLossScalar]);
  report.balance_loss = static_cast<double>(scalars[kBalanceScalar]);
  report.num_tokens = num_tokens();
  report.global_tokens = config_.global_batch;
  std::ranges::transform(
      context_.timer.seconds(),
      context_.exchange_timer.seconds(),
      report.phase_seconds.begin(),
      std::plus<>()
  );
  report.trace = model_->trace();
  report.dispatch = context_.dispatch;
  report.combine = context_.combine;
  for (int block = 0; block < config_.model.num_blocks; ++block) {
    std::vector<int64_t> routes(static_cast<size_t>(config_.model.num_experts));
    for (size_t i = 0; i < batches_.size(); ++i) {
      const Plan& plan = model_->plan(i, block);
      const std::vector<int64_t> more = plan.routes_per_expert();
      if (config_.replicas > 0) {
        const Plan::Load load = plan.load();
        report.busiest += static_cast<double>(load.busiest);
        report.unbalanced += static_cast<double>(load.unbalanced);
        report.mean_load += load.mean;
      }
      std::ranges::transform(routes, more, routes.begin(), std::plus<>());
    }
    report.routes.insert(report.routes.end(), routes.begin(), routes.end());
  }
  return report;
}

int64_t Trainer::num_tokens() const {
  int64_t sum = 0;
  for (const MicroBatch& micro_batch : micro_batches_) {
    sum += micro_batch.tokens.size();
  }
  return sum;
}

// Returns what this rank owns, as it is now, for checkpoints; header() tells of which run.
std::vector<StatePiece> Trainer::pieces() {
  const auto part = [](std::span<float> values, AdamMoments& moments, size_t begin, size_t size) {
    return std::array<std::span<float>, 3>{
        values.subspan(begin, size),
        std::span(moments.mean).subspan(begin, size),
        std::span(moments.square).subspan(begin, size)};
  };
  const auto own = replicated_.own().value;
  const Cut kept = cut(0, layout_.num_replicated, replicated_.own_begin(), own.size());
  std::vector<StatePiece> pieces = {
      {replicated_.own_begin(), part(own, own_moments_, kept.begin, kept.end)}};
  for (const ParameterSpan& span : layout_.experts()) {
    pieces.push_back(
        {span.model_begin, part(expert_values_, expert_moments_, span.begin, span.size)}
    );
  }
  return pieces;
}

CheckpointHeader Trainer::header() const {
  return {
      .model = config_.model,
      .global_batch = config_.global_batch,
      .seed = config_.seed,
      .dtype = config_.dtype,
      .text_bytes = text_.size(),
      .text_checksum = checksum(text_),
      .num_elements = layout_.num_model,
      .steps_done = steps_done_};
}

void Trainer::save(const std::string& path) {
  write_checkpoint(group_, path, header(), pieces());
}

void Trainer::resume(const std::string& path) {
  steps_done_ = read_checkpoint(group_, path, header(), pieces());
  replicated_.broadcast();
}

uint64_t Trainer::fingerprint() {
  uint64_t own = 0;
  for (const StatePiece& piece : pieces()) {
    own += checksum(piece.parts[0], piece.model_begin);
  }
  const auto parts = gather_values(group_, own);
  return std::reduce(parts.begin(), parts.end());
}

int64_t Trainer::num_active_parameters() const {
  const ModelConfig& model = config_.model;
  const int64_t expert = int64_t{3} * model.hidden * model.expert_hidden;
  const int64_t idle = int64_t{model.num_blocks} * (model.num_experts - model.topk) * expert;
  const int64_t unseen = int64_t{model.window} * (kNumBytes - 1) * model.hidden;
  return num_parameters() - idle - unseen;
}

}  // namespace weft::moe
