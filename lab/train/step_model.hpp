// SPDX-License-Identifier: Apache-2.0
// What computes a step of training: one model for each micro-batch, on the host or on a GPU, run
// one after another or overlapped (lanes/schedule.hpp). The trainer (trainer.hpp) has one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "train/batch.hpp"
#include "train/lanes/schedule.hpp"
#include "train/layers/adamw.hpp"
#include "train/layers/parameters.hpp"
#include "train/model.hpp"
#include "weft/group.hpp"
#include "weft/plan.hpp"

namespace weft::moe {

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
