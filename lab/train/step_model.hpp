// SPDX-License-Identifier: Apache-2.0
// What computes a step of training: one model for each micro-batch, on the host (model.hpp) or on a
// GPU (gpu/micro_batch.hpp), run one after another or overlapped (lanes/schedule.hpp). The trainer
// (trainer.hpp) has one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <type_traits>
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

// Gives back the rows that a block was sent, once its experts are through with them. On a GPU the
// streams may still use them: there they go when the next ones come.
template <class Block>
void release_rows(Block& block) {
  if constexpr (std::is_same_v<Block, MoeBlock>) {
    block.release();
  }
}

// Collective. Forward and backward of the micro-batch that `model` has loaded, in one lane.
template <class AnyModel>
void forward_backward(AnyModel& model) {
  model.pre_process();
  for (auto& block : model.blocks()) {
    block.pre_dispatch(model.x());
    block.moe_dispatch();
    block.mlp();
    block.moe_combine(model.x());
  }
  model.post_process();
  model.post_process_backward();
  for (size_t idx = model.blocks().size(); idx-- > 0;) {
    auto& block = model.blocks()[idx];
    block.moe_combine_backward(model.x());
    block.mlp_backward();
    block.mlp_weight_gradient();
    release_rows(block);
    block.moe_dispatch_backward();
    block.pre_dispatch_backward(model.x());
  }
  model.pre_process_backward();
}

// The same as nodes of a schedule: one forward and backward of the micro-batch that `model` has
// loaded; it must outlive the schedule. A model has the pieces of Model, and pause(lane), which
// ends the phase that a piece has begun: what lies between the nodes is nobody's time.
template <class AnyModel>
[[nodiscard]] overlap::ChunkNodes chunk_nodes(AnyModel& model, const OverlapConfig& config) {
  const auto piece = [&model](auto work) {
    return [&model, work = std::move(work)](const overlap::LaneContext& lane) {
      work();
      model.pause(lane.lane);
    };
  };
  const auto node = [&](auto forward, auto backward) {
    overlap::Node made;
    made.forward = piece(std::move(forward));
    made.backward = piece(std::move(backward));
    return made;
  };

  overlap::ChunkNodes nodes;
  nodes.pre_process =
      node([&model] { model.pre_process(); }, [&model] { model.pre_process_backward(); });
  for (auto& block : model.blocks()) {
    auto& x = model.x();
    overlap::LayerNodes& layer = nodes.layers.emplace_back();
    layer.pre_dispatch = node(
        [&block, &x] { block.pre_dispatch(x); }, [&block, &x] { block.pre_dispatch_backward(x); }
    );
    layer.moe_dispatch =
        node([&block] { block.moe_dispatch(); }, [&block] { block.moe_dispatch_backward(); });
    layer.mlp = node(
        [&block] { block.mlp(); },
        [&block, delays = config.delays_weight_gradients] {
          block.mlp_backward();
          if (!delays) {
            block.mlp_weight_gradient();
          }
        }
    );
    layer.mlp.release = [&block](const overlap::LaneContext&) { release_rows(block); };
    if (config.delays_weight_gradients) {
      layer.mlp.weight_gradient = piece([&block] { block.mlp_weight_gradient(); });
    }
    layer.moe_combine = node(
        [&block, &x] { block.moe_combine(x); }, [&block, &x] { block.moe_combine_backward(x); }
    );
  }
  nodes.post_process =
      node([&model] { model.post_process(); }, [&model] { model.post_process_backward(); });
  return nodes;
}

// One model for each micro-batch, on the host or on a GPU.
template <class OneModel>
class MicroBatchModels : public StepModel {
 public:
  explicit MicroBatchModels(const StepModelParts& parts) : parts_(parts) {}

  [[nodiscard]] const overlap::Trace& trace() const override { return trace_; }
  [[nodiscard]] const Plan& plan(size_t micro_batch, int block) const override {
    return models_[micro_batch].blocks()[static_cast<size_t>(block)].plan();
  }
  [[nodiscard]] std::span<const int32_t> topk_idx(int block) override {
    all_topk_idx_.clear();
    for (OneModel& model : models_) {
      const auto part = model.blocks()[static_cast<size_t>(block)].topk_idx();
      all_topk_idx_.insert(all_topk_idx_.end(), part.begin(), part.end());
    }
    return all_topk_idx_;
  }

 protected:
  // Forward and backward of all; with overlap by run_schedule(schedule), which returns the trace.
  template <class RunSchedule>
  void run(std::span<const Batch> batches, const RunSchedule& run_schedule) {
    for (size_t idx = 0; idx < models_.size(); ++idx) {
      models_[idx].load(batches[idx]);
    }
    if (!parts_.overlap.is_on) {
      for (OneModel& model : models_) {
        moe::forward_backward(model);
      }
      return;
    }
    parts_.context.timer.pause();
    const auto nodes = [&](int idx) {
      return chunk_nodes(models_[static_cast<size_t>(idx)], parts_.overlap);
    };
    trace_ = run_schedule(
        overlap::schedule_overlapped({.num = static_cast<int>(models_.size()), .nodes = nodes})
    );
  }

  StepModelParts parts_;
  std::deque<OneModel> models_;  // by micro-batch

 private:
  overlap::Trace trace_;
  std::vector<int32_t> all_topk_idx_;
};

// The model on the host's cores.
class HostModel final : public MicroBatchModels<Model> {
 public:
  explicit HostModel(const StepModelParts& parts);

  LossShare forward_backward(std::span<const Batch> batches) override;
  void update_experts(const AdamStep& step) override;
};

}  // namespace weft::moe
