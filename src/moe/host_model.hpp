// SPDX-License-Identifier: Apache-2.0
// The model on the host's cores: all micro-batches of a step, one after another or overlapped.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "moe/batch.hpp"
#include "moe/model.hpp"
#include "moe/step_model.hpp"
#include "overlap/nodes.hpp"

namespace weft::moe {

// The nodes of one micro-batch, which give back the rows that arrived once nobody reads them.
[[nodiscard]] overlap::ChunkNodes nodes_of(Model& model, const OverlapConfig& config);

class HostModel final : public StepModel {
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
  [[nodiscard]] const overlap::Trace& trace() const override { return trace_; }
  [[nodiscard]] const Plan& plan(size_t micro_batch, int block) const override;
  [[nodiscard]] std::span<const int32_t> topk_idx(int block) override;
  [[nodiscard]] std::span<const float> weights(int block) override;

 private:
  void run_overlapped();
  [[nodiscard]] static const MoeBlock& block_of(const Model& model, int block) {
    return model.blocks()[static_cast<size_t>(block)];
  }

  MoeContext* context_;
  OverlapConfig overlap_;
  std::deque<Model> models_;  // by micro-batch
  overlap::Trace trace_;
  std::vector<int32_t> all_topk_idx_;
  std::vector<float> all_weights_;
};

}  // namespace weft::moe
