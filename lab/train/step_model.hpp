// SPDX-License-Identifier: Apache-2.0
// What computes a step of training: one model for each micro-batch, on the host or on a GPU, run
// one after another or overlapped (lanes/schedule.hpp). The trainer (trainer.hpp) has one.
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

class StepModel {
 public:
  StepModel() = default;
  virtual ~StepModel() = default;
  StepModel(const StepModel&) = delete;
  StepModel& operator=(const StepModel&) = delete;

  // Collective. Forward and backward of every micro-batch of the step; adds up their losses, and
  // their gradients in their order. With overlap the exchange is called from another thread, and
  // what that throws is thrown here. Where only one rank throws, the others throw what their
  // exchange then says, at the latest at its deadline, and it is of no more use.
  virtual LossShare forward_backward(std::span<const Batch> batches) = 0;

  // One step of AdamW for this rank's experts.
  virtual void update_experts(const AdamStep& step) = 0;
  // A model on a GPU copies what it needs of the host's memory, and experts back into it: the
  // replicated values, and the experts' values and moments.
  virtual void load_replicated() {}
  virtual void load_experts() {}
  virtual void store_experts() {}

  // Results of the last forward_backward; the spans, in host memory, stay until the next.
  // What ran when on the two lanes; empty without overlap.
  [[nodiscard]] virtual const overlap::Trace& trace() const = 0;
  [[nodiscard]] virtual const Plan& plan(size_t micro_batch, int block) const = 0;
  // [num_tokens, topk] of all micro-batches, one after another; empty before the first.
  [[nodiscard]] virtual std::span<const int32_t> topk_idx(int block) = 0;
};

// All of it must outlive the model.
struct StepModelParts {
  const Group& group;
  MoeContext& context;  // its exchange decides which GPU
  std::span<const MicroBatch> micro_batches;
  OverlapConfig overlap;
  const ModelLayout& layout;
  ModelMemory memory;                     // of the host
  AdamMoments* expert_moments = nullptr;  // of the host; not for forward_backward()
};

// A model whose fp32 experts and their moments live on the GPU, and which computes there, in bf16,
// everything a token meets. Its forward_backward() writes the gradients of the replicated
// parameters to the host, as of one shard, and keeps those of the experts. gpu/model.cpp or
// model_none.cpp makes it. Throws Error (kUnsupported, kNotAvailable, kCuda, kOutOfMemory). Not
// collective.
[[nodiscard]] std::unique_ptr<StepModel> make_device_model(const StepModelParts& parts);

// Throws Error if this process cannot train on GPU `index`: no such GPU, or no library of products.
void check_can_train_on_gpu(int index);

// Embedding, blocks, head and loss in one: what a rank computes for its share of a micro-batch. One
// model for each micro-batch that is under way; they share their parameters.
template <class Rank>
class Model {
 public:
  // `shards` of the tokens of this micro-batch, which is the first or the last of a step.
  Model(
      Rank& rank,
      Shards shards,
      bool is_first,
      bool is_last,
      const ModelLayout& layout,
      const Weights<ValueOf<Rank>>& weights
  )
      : rank_(&rank),
        tokens_(std::make_unique<Tokens<Rank>>(std::move(shards), is_first, is_last, rank.config())
        ),
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

  // What the next forward and backward are of; must outlive them.
  void load(const Batch& batch) {
    const auto upload = [&](const std::vector<std::byte>& from, ArrayOf<Rank, uint8_t>& to) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(from.data());
      rank_->math().upload(std::span(bytes, from.size()), to);
    };
    upload(batch.windows, windows_);
    upload(batch.targets, targets_);
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
        {tokens_->num, kNumBytes, logits_.data(), targets_.data(), loss_scale()},
        losses_.data(),
        grad_logits_.data()
    );
  }
  void post_process_backward() {
    start();
    ArrayOf<Rank, float>& grad_normed = rank_->scratch().grad_normed;
    rank_->math().clear(grad_normed);
    head_.backward(grad_logits_.data(), norm_.normed(), grad_normed.data());
    rank_->math().clear(tokens_->x);
    norm_.backward();
  }
  void pre_process_backward() {
    start();
    rank_->math().embed_backward(embedding(), tokens_->x.data(), table_, tokens_->shards);
  }
  // Ends the phase that a piece on this lane has begun.
  void pause(overlap::Lane lane) { rank_->pause(lane); }

  // Fetches what share() needs; it is there once the compute lane is through.
  void finish() {
    rank_->math().download(losses_, host_losses_);
    std::ranges::for_each(blocks_, &Block<Rank>::finish);
  }
  // Of the last forward.
  [[nodiscard]] LossShare share() const {
    LossShare share;
    for (const Range& shard : tokens_->shards) {
      double sum = 0;
      for (int64_t t = shard.begin; t < shard.end; ++t) {
        sum += static_cast<double>(host_losses_[static_cast<size_t>(t)]);
      }
      share.cross_entropy.push_back(sum * static_cast<double>(loss_scale()));
    }
    for (const Block<Rank>& block : blocks_) {
      share.balance += block.balance_share() / static_cast<double>(blocks_.size());
    }
    return share;
  }

  [[nodiscard]] std::span<Block<Rank>> blocks() { return blocks_; }
  [[nodiscard]] std::span<const Block<Rank>> blocks() const { return blocks_; }

 private:
  void start() { rank_->start(overlap::Lane::kCompute, Phase::kDense); }
  [[nodiscard]] EmbeddingShape embedding() const {
    return {tokens_->num, rank_->config().window, rank_->config().hidden, windows_.data()};
  }
  [[nodiscard]] float loss_scale() const {
    return 1.0F / static_cast<float>(rank_->context().global_tokens);
  }

  Rank* rank_;
  std::unique_ptr<Tokens<Rank>> tokens_;  // in one place: blocks point to it
  Weight<ValueOf<Rank>> table_;
  std::vector<Block<Rank>> blocks_;
  Norm<Rank> norm_;                                 // before the head
  Linear<Rank> head_;                               // [kNumBytes, hidden]
  ArrayOf<Rank, uint8_t> windows_;                  // [num_tokens, window]
  ArrayOf<Rank, uint8_t> targets_;                  // [num_tokens]
  ArrayOf<Rank, float> logits_;                     // [num_tokens, kNumBytes]
  ArrayOf<Rank, ValueOf<Rank>> grad_logits_;        // the same
  ArrayOf<Rank, typename Rank::Math::Sum> losses_;  // [num_tokens]
  std::vector<typename Rank::Math::Sum> host_losses_;
};

// One forward and backward of the micro-batch that `model` has loaded, as nodes of a schedule; the
// model must outlive it.
template <class Rank>
[[nodiscard]] overlap::ChunkNodes chunk_nodes(Model<Rank>& model, const OverlapConfig& config) {
  using overlap::NodeKind;
  using Whole = Model<Rank>;
  using Part = Block<Rank>;
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

// One model for each micro-batch, on the host or on a GPU.
template <class Rank>
class MicroBatchModels : public StepModel {
 public:
  explicit MicroBatchModels(const StepModelParts& parts)
      : parts_(parts), rank_(parts.group, parts.context, most_tokens(parts.micro_batches)) {}

  [[nodiscard]] const overlap::Trace& trace() const override { return trace_; }
  [[nodiscard]] const Plan& plan(size_t micro_batch, int block) const override {
    return models_[micro_batch].blocks()[static_cast<size_t>(block)].plan();
  }
  [[nodiscard]] std::span<const int32_t> topk_idx(int block) override {
    all_topk_idx_.clear();
    for (Model<Rank>& model : models_) {
      const auto part = model.blocks()[static_cast<size_t>(block)].topk_idx();
      all_topk_idx_.insert(all_topk_idx_.end(), part.begin(), part.end());
    }
    return all_topk_idx_;
  }

 protected:
  // `weights` in the memory of the device.
  void make_models(const Weights<ValueOf<Rank>>& weights) {
    const size_t num = parts_.micro_batches.size();
    for (size_t idx = 0; idx < num; ++idx) {
      Shards shards = Rank::shards_of(parts_.micro_batches[idx]);
      models_.emplace_back(
          rank_, std::move(shards), idx == 0, idx + 1 == num, parts_.layout, weights
      );
    }
  }

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
      for (Model<Rank>& model : models_) {
        std::ranges::for_each(model.blocks(), &Block<Rank>::release);
      }
      throw;
    }
  }

  // Of all micro-batches, once they have run.
  [[nodiscard]] LossShare share() {
    std::ranges::for_each(models_, &Model<Rank>::finish);
    rank_.synchronize();
    LossShare share = models_.front().share();
    for (size_t idx = 1; idx < models_.size(); ++idx) {
      share += models_[idx].share();
    }
    return share;
  }

  StepModelParts parts_;
  Rank rank_;
  std::deque<Model<Rank>> models_;  // by micro-batch

 private:
  static int64_t most_tokens(std::span<const MicroBatch> micro_batches) {
    const auto tokens_of = [](const MicroBatch& one) { return one.tokens.size(); };
    return tokens_of(std::ranges::max(micro_batches, {}, tokens_of));
  }

  overlap::Trace trace_;
  std::vector<int32_t> all_topk_idx_;
};

// The model on the host's cores.
class HostModel : public MicroBatchModels<HostRank> {
 public:
  explicit HostModel(const StepModelParts& parts) : MicroBatchModels(parts) {
    const auto weight_of = [](const Parameter& flat) -> Weight<float> {
      return {flat.value.data(), flat.value.data(), flat.grad.data(), flat.grad_stride};
    };
    make_models({weight_of(parts.memory.replicated), weight_of(parts.memory.experts)});
  }

  // With overlap all calls of the exchange come from the exchange lane, one thread for the whole
  // run, in the order of the schedule, which is that of every rank.
  LossShare forward_backward(std::span<const Batch> batches) override {
    run(batches, overlap::run_on_threads);
    return share();
  }
  void update_experts(const AdamStep& step) override {
    const Parameter& experts = parts_.memory.experts;
    AdamMoments& moments = *parts_.expert_moments;
    adamw_update(step, experts.value, experts.grad, moments, 0, experts.value.size());
  }
};

}  // namespace weft::moe
