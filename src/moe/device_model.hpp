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
#include "moe/model.hpp"
#include "moe/parameters.hpp"
#include "weft/group.hpp"

namespace weft::moe {

class DeviceModel {
 public:
  virtual ~DeviceModel() = default;
  DeviceModel(const DeviceModel&) = delete;
  DeviceModel& operator=(const DeviceModel&) = delete;

  // Collective. As Model::forward_backward: writes the gradients of the replicated parameters to
  // the host, as of one shard, and keeps those of the experts.
  virtual LossShare forward_backward(const Batch& batch) = 0;
  virtual void update_experts(const AdamStep& step) = 0;

  // The host's replicated values are new.
  virtual void load_replicated() = 0;
  // Experts' values and moments from, or to, the host's memory.
  virtual void load_experts() = 0;
  virtual void store_experts() = 0;

  // Of the last forward_backward; the spans, in host memory, until the next.
  [[nodiscard]] virtual const Plan& plan(int block) const = 0;
  [[nodiscard]] virtual std::span<const int32_t> topk_idx(int block) = 0;
  [[nodiscard]] virtual std::span<const float> weights(int block) = 0;

 protected:
  DeviceModel() = default;
};

// All of it must outlive the model.
struct DeviceModelParts {
  const Group& group;
  MoeContext& context;  // its exchange decides which GPU
  const ModelLayout& layout;
  ModelMemory memory;  // of the host
  AdamMoments& expert_moments;
};

// Throws Error (kUnsupported, kNotAvailable, kCuda, kOutOfMemory). Not collective.
[[nodiscard]] std::unique_ptr<DeviceModel> make_device_model(const DeviceModelParts& parts);

// Throws Error if this process cannot train on GPU `index`: no such GPU, or no library of products.
void check_can_train_on_gpu(int index);

}  // namespace weft::moe
