// SPDX-License-Identifier: Apache-2.0
// The model on a GPU: what Model, and AdamW of the experts, are on the host. The fp32 experts and
// their moments live on the GPU, and everything a token meets is computed there, in bf16; the
// replicated parameters are summed and updated on the host, as ever. model_cuda.cpp or
// model_none.cpp makes one.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "moe/adamw.hpp"
#include "moe/batch.hpp"
#include "moe/parameters.hpp"
#include "moe/step_model.hpp"
#include "weft/group.hpp"

namespace weft::moe {

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

}  // namespace weft::moe
