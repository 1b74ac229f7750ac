// SPDX-License-Identifier: Apache-2.0
// The computation of a step of training: one model for each micro-batch, run one after another or
// overlapped (lanes/schedule.hpp). The trainer (trainer.hpp) has one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "train/batch.hpp"
#include "train/lanes/schedule.hpp"
#include "train/layers/adamw.hpp"
#include "train/layers/block.hpp"
#include "train/layers/parameters.hpp"
#include "weft/group.hpp"
#include "weft/plan.hpp"

namespace weft::moe {

// This rank's part of the losses; the sum over the ranks is the loss of the global batch.
struct LossShare {
  std::vector<double> cross_entropy;  // [num_shards of this rank] nats per byte
  double balance = 0;                 // mean over the blocks

  // Adds the share of another micro-batch.
  LossShare& operator+=(const LossShare& other) {
    std::ranges::transform(
        cross_entropy, other.cross_entropy, cross_entropy.begin(), std::plus<>()
    );
    balance += other.balance;
    return *this;
  }
};

// All of it must outlive the model.
struct StepModelParts {
  const Group& group;
  MoeContext& context;
  std::span<const MicroBatch> micro_batches;
  OverlapConfig overlap;
  const ModelLayout& layout;
  ModelMemory memory;
  AdamMoments* expert_moments = nullptr;  // not for forward_backward()
};

// Embedding, blocks, head and loss in one: what a rank computes for its share of a micro-batch. One
// model for each micro-batch that is under way; they share their parameters.
class Model {
 public:
  // `shards` of the tokens of this micro-batch.
  Model(Rank& rank, Shards shards, const ModelLayout& layout, const Weights& weights)
      : rank_(&rank),
        tokens_(std::make_unique<Tokens>(std::move(shards), rank.config())),
        table_(weights.replicated.at(layout.embedding)),
        norm_(rank, *tokens_, weights.replicated.at(layout.final_norm)),
        head_(rank, *tokens_, weights.replicated.at(layout.head), kNumBytes),
        logits_(static_cast<size_t>(tokens_->num * kNumBytes)),
        grad_logits_(logits_.size()),
        losses_(static_cast<size_t>(tokens_->num)) {
    blocks_.reserve(layout.blocks.size());
    for (const BlockLayout& block : layout.blocks) {
      blocks_.emplace_back(rank, *tokens_, block, weights);
    }
  }

  // Sets the batch of the next forward and backward, which must outlive them.
  void load(const Batch& batch) {
    windows_ = reinterpret_cast<const uint8_t*>(batch.windows.data());
    targets_ = reinterpret_cast<const uint8_t*>(batch.targets.data());
  }

  // The pieces of a forward and backward, in their order, the blocks' own aside: these compute and
  // call nobody. All of them add to the gradients of cross_entropy + balance_weight * sum of the
  // blocks' balancing losses.
  void pre_process() {
    start();
    rank_->math().embed(embedding(), table_.value, tokens_->x.data());
  }
  void post_process() {
    start();
    norm_.forward();
    head_.forward(norm_.normed(), logits_.data());
    rank_->math().cross_entropy(
        {tokens_->num, kNumBytes, logits_.data(), targets_, loss_scale()},
        losses_.data(),
        grad_logits_.data()
    );
  }
  void post_process_backward() {
    start();
    std::vector<float>& grad_normed = rank_->scratch().grad_normed;
    std::ranges::fill(grad_normed, 0.0F);
    head_.backward(grad_logits_.data(), norm_.normed(), grad_normed.data());
    std::ranges::fill(tokens_->x, 0.0F);
    norm_.backward();
  }
  void pre_process_backward() {
    start();
    rank_->math().embed_backward(embedding(), tokens_->x.data(), table_, tokens_->shards);
  }
  // Ends the phase that a piece on this lane has begun.
  void pause(overlap::Lane lane) { rank_->pause(lane); }

  // Returns this rank's share of the loss in the last forward.
  [[nodiscard]] LossShare share() const {
    LossShare share;
    for (const Range& shard : tokens_->shards) {
      double sum = 0;
      for (int64_t t = shard.begin; t < shard.end; ++t) {
        sum += losses_[static_cast<size_t>(t)];
      }
      share.cross_entropy.push_back(sum * static_cast<double>(loss_scale()));
    }
    for (const Block& block : blocks_) {
      share.balance += block.balance_share() / static_cast<double>(blocks_.size());
    }
    return share;
  }

  [[nodiscard]] std::span<Block> blocks() { return blocks_; }
  [[nodiscard]] std::span<const Block> blocks() const { return blocks_; }

 private:
  void start() { rank_->start(overlap::Lane::kCompute, Phase::kDense); }
  [[nodiscard]] EmbeddingShape embedding() const {
    return {tokens_->num, rank_->config().window, rank_->config().hidden, windows_};
  }
  [[nodiscard]] float loss_scale() const {
    return 1.0F / static_cast<float>(rank_->context().global_tokens);
  }

  Rank* rank_;
  std::unique_ptr<Tokens> tokens_;  // in one place: blocks point to it
  Weight table_;
  std::vector<Block> blocks_;
  Norm norm_;                         // before the head
  Linear head_;                       // [kNumBytes, hidden]
  const uint8_t* windows_ = nullptr;  // [num_tokens, window] of the batch
  const uint8_t* targets_ = nullptr;  // [num_tokens]
  std::vector<float> logits_;         // [num_tokens, kNumBytes]
  std::vector<float> grad_logits_;    // the same
  std::vector<double> losses_;        // [num_tokens]
};

// One forward and backward of the micro-batch that `model` has loaded, as nodes of a schedule; the
// model must outlive it.
[[nodiscard]] inline overlap::ChunkNodes chunk_nodes(Model& model, const OverlapConfig& config) {
  using overlap::NodeKind;
  using Whole = Model;
  using Part = Block;
  const auto piece = [&model](auto& of, auto work) {
    return [&model, &of, work](const overlap::LaneContext& lane) {
      (of.*work)();
      model.pause(lane.lane);
    };
  };
  overlap::ChunkNodes nodes = {.num_layers = static_cast<int>(model.blocks().size())};
  const auto add = [&](NodeKind kind, int layer, auto& of, auto forward, auto backward) {
    nodes.at(kind, layer) = {piece(of, forward), piece(of, backward)};
  };
  add(NodeKind::kPreProcess, -1, model, &Whole::pre_process, &Whole::pre_process_backward);
  for (int idx = 0; idx < nodes.num_layers; ++idx) {
    Part& block = model.blocks()[static_cast<size_t>(idx)];
    const bool delays = config.delays_weight_gradients;
    const auto mlp_backward = delays ? &Part::mlp_backward : &Part::mlp_whole_backward;
    add(NodeKind::kPreDispatch, idx, block, &Part::pre_dispatch, &Part::pre_dispatch_backward);
    add(NodeKind::kMoeDispatch, idx, block, &Part::moe_dispatch, &Part::moe_dispatch_backward);
    add(NodeKind::kMlp, idx, block, &Part::mlp, mlp_backward);
    if (delays) {
      nodes.at(NodeKind::kMlp, idx).weight_gradient = piece(block, &Part::mlp_weight_gradient);
    }
    add(NodeKind::kMoeCombine, idx, block, &Part::moe_combine, &Part::moe_combine_backward);
  }
  add(NodeKind::kPostProcess, -1, model, &Whole::post_process, &Whole::post_process_backward);
  return nodes;
}

class StepModel {
 public:
  explicit StepModel(const StepModelParts& parts)
      : parts_(parts), rank_(parts.context, most_tokens(parts.micro_batches)) {
    const auto weight_of = [](const Parameter& flat) -> Weight {
      return {flat.value.data(), flat.grad.data(), flat.grad_stride};
    };
    const Weights weights = {weight_of(parts.memory.replicated), weight_of(parts.memory.experts)};
    for (const MicroBatch& micro_batch : parts.micro_batches) {
      models_.emplace_back(rank_, micro_batch.shards, parts.layout, weights);
    }
  }
  virtual ~StepModel() = default;
  StepModel(const StepModel&) = delete;
  StepModel& operator=(const StepModel&) = delete;

  // Collective. Forward and backward of every micro-batch of the step; adds up their losses, and
  // their gradients in their order. With overlap all calls of the exchange come from the exchange
  // lane, one thread for the whole run, in the order of the schedule, which is that of every rank;
  // what they throw is thrown here. Where only one rank throws, the others throw what their
  // exchange then says, at the latest at its deadline, and it is of no more use.
  virtual LossShare forward_backward(std::span<const Batch> batches) {
    run(batches, overlap::run_on_threads);
    return share();
  }

  // One step of AdamW for this rank's experts.
  void update_experts(const AdamStep& step) {
    const Parameter& experts = parts_.memory.experts;
    AdamMoments& moments = *parts_.expert_moments;
    adamw_update(step, experts.value, experts.grad, moments, 0, experts.value.size());
  }

  // Results of the last forward_backward; the spans stay until the next.
  // What ran when on the two lanes; empty without overlap.
  [[nodiscard]] const overlap::Trace& trace() const { return trace_; }
  [[nodiscard]] const Plan& plan(size_t micro_batch, int block) const {
    return models_[micro_batch].blocks()[static_cast<size_t>(block)].plan();
  }
  // [num_tokens, topk] of all micro-batches, one after another; empty before the first.
  [[nodiscard]] std::span<const int32_t> topk_idx(int block) {
    all_topk_idx_.clear();
    for (Model& model : models_) {
      const auto part = model.blocks()[static_cast<size_t>(block)].topk_idx();
      all_topk_idx_.insert(all_topk_idx_.end(), part.begin(), part.end());
    }
    return all_topk_idx_;
  }

 protected:
  // Forward and backward of all; with overlap by run_overlapped(schedule), which returns the trace.
  template <class RunOverlapped>
  void run(std::span<const Batch> batches, const RunOverlapped& run_overlapped) {
    for (size_t idx = 0; idx < models_.size(); ++idx) {
      models_[idx].load(batches[idx]);
    }
    const overlap::MicroBatches all = {
        .num = static_cast<int>(models_.size()), .nodes = [&](int idx) {
          return chunk_nodes(models_[static_cast<size_t>(idx)], parts_.overlap);
        }};
    if (!parts_.overlap.is_on) {
      overlap::run_in_turn(all);
      return;
    }
    parts_.context.timer.pause();
    try {
      trace_ = run_overlapped(overlap::schedule_overlapped(all));
    } catch (...) {  // the lanes are through: what the exchange lent goes back
      for (Model& model : models_) {
        std::ranges::for_each(model.blocks(), &Block::release);
      }
      throw;
    }
  }

  // Returns this rank's share of the loss in all micro-batches, once they have run.
  [[nodiscard]] LossShare share() const {
    LossShare share = models_.front().share();
    for (size_t idx = 1; idx < models_.size(); ++idx) {
      share += models_[idx].share();
    }
    return share;
  }

 private:
  static int64_t most_tokens(std::span<const MicroBatch> micro_batches) {
    const auto tokens_of = [](const MicroBatch& one) { return one.tokens.size(); };
    return tokens_of(std::ranges::max(micro_batches, {}, tokens_of));
  }

  StepModelParts parts_;
  Rank rank_;
  std::deque<Model> models_;  // by micro-batch
  overlap::Trace trace_;
  std::vector<int32_t> all_topk_idx_;
};

}  // namespace weft::moe
