// SPDX-License-Identifier: Apache-2.0
// What computes a step, wherever it does: the model on the host or on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "train/batch.hpp"
#include "train/lanes/schedule.hpp"
#include "train/lanes/trace.hpp"
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
  // what that throws is thrown here. Where one rank alone throws, the others throw what their
  // exchange then says, at the latest at its deadline, and it is of no more use.
  virtual LossShare forward_backward(std::span<const Batch> batches) = 0;

  // Of the last forward_backward; the spans, in host memory, until the next.
  // What ran when on the two lanes; empty without overlap.
  [[nodiscard]] virtual const overlap::Trace& trace() const = 0;
  [[nodiscard]] virtual const Plan& plan(size_t micro_batch, int block) const = 0;
  // [num_tokens, topk] of all micro-batches, one after another; empty before the first.
  [[nodiscard]] virtual std::span<const int32_t> topk_idx(int block) = 0;
  [[nodiscard]] virtual std::span<const float> weights(int block) = 0;
};

// One model for each micro-batch, on the host or on a GPU.
template <class Base, class OneModel>
class MicroBatchModels : public Base {
 public:
  [[nodiscard]] const overlap::Trace& trace() const override { return trace_; }
  [[nodiscard]] const Plan& plan(size_t micro_batch, int block) const override {
    return models_[micro_batch].blocks()[static_cast<size_t>(block)].plan();
  }
  [[nodiscard]] std::span<const int32_t> topk_idx(int block) override {
    return joined(all_topk_idx_, block, [](auto& one) { return one.topk_idx(); });
  }
  [[nodiscard]] std::span<const float> weights(int block) override {
    return joined(all_weights_, block, [](auto& one) { return one.weights(); });
  }

 protected:
  std::deque<OneModel> models_;  // by micro-batch
  overlap::Trace trace_;

 private:
  template <class T, class Get>
  std::span<const T> joined(std::vector<T>& all, int block, const Get& get) {
    all.clear();
    for (OneModel& model : models_) {
      const std::span<const T> part = get(model.blocks()[static_cast<size_t>(block)]);
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }

  std::vector<int32_t> all_topk_idx_;
  std::vector<float> all_weights_;
};

// The model on a GPU: what Model, and AdamW of the experts, are on the host. The fp32 experts and
// their moments live on the GPU, and everything a token meets is computed there, in bf16; the
// replicated parameters are summed and updated on the host, as ever. gpu/model.cpp or
// model_none.cpp makes one.
//
// Its forward_backward() writes the gradients of the replicated parameters to the host, as of one
// shard, and keeps those of the experts.
class DeviceModel : public StepModel {
 public:
  virtual void update_experts(const AdamStep& step) = 0;

  // The host's replicated values are new.
  virtual void load_replicated() = 0;
  // Experts' values and moments from, or to, the host's memory.
  virtual void load_experts() = 0;
  virtual void store_experts() = 0;
};

// All of it must outlive the model.
struct DeviceModelParts {
  const Group& group;
  MoeContext& context;  // its exchange decides which GPU
  std::span<const MicroBatch> micro_batches;
  OverlapConfig overlap;
  const ModelLayout& layout;
  ModelMemory memory;  // of the host
  AdamMoments& expert_moments;
};

// Throws Error (kUnsupported, kNotAvailable, kCuda, kOutOfMemory). Not collective.
[[nodiscard]] std::unique_ptr<DeviceModel> make_device_model(const DeviceModelParts& parts);

// Throws Error if this process cannot train on GPU `index`: no such GPU, or no library of products.
void check_can_train_on_gpu(int index);

// The nodes of one micro-batch, which give back the rows that arrived once nobody reads them.
[[nodiscard]] overlap::ChunkNodes nodes_of(Model& model, const OverlapConfig& config);

// The model on the host's cores: all micro-batches of a step, one after another or overlapped.
class HostModel final : public MicroBatchModels<StepModel, Model> {
 public:
  // All of it must outlive the model.
  HostModel(
      MoeContext& context,
      std::span<const MicroBatch> micro_batches,
      const OverlapConfig& overlap,
      const ModelLayout& layout,
      const ModelMemory& memory
  );

  LossShare forward_backward(std::span<const Batch> batches) override;

 private:
  void run_overlapped();

  MoeContext* context_;
  OverlapConfig overlap_;
};

}  // namespace weft::moe
