// SPDX-License-Identifier: Apache-2.0
// Sizes and settings of the byte-level language model and its training.
//
// Purpose of this folder: a small mixture-of-experts model that shows how the library is used. May
// include: the public headers and core. May not include: anything else.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "core/env.hpp"
#include "weft/tensor.hpp"

namespace weft::moe {

struct ModelConfig {
  int window = 16;          // bytes that predict the next one
  int hidden = 128;         // hidden * dtype bytes is a multiple of 16
  int expert_hidden = 256;  // inner width of an expert
  int num_blocks = 3;
  int num_experts = 16;  // per block, divisible by the number of ranks
  int topk = 2;
  float balance_weight = 0.01F;  // of the load-balancing loss in the total loss

  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

// Calls visit(name, value) for every field, by the name that it has in files and messages.
template <class Visit>
void visit_fields(const ModelConfig& model, const Visit& visit) {
  visit("window", model.window);
  visit("hidden", model.hidden);
  visit("expert_hidden", model.expert_hidden);
  visit("num_blocks", model.num_blocks);
  visit("num_experts", model.num_experts);
  visit("topk", model.topk);
  visit("balance_weight", model.balance_weight);
}

// Overlap of a step's micro-batches: what runs at the same time. The results are the same.
struct OverlapConfig {
  bool is_on = false;  // the forward of one runs with the backward of the one before it
  bool delays_weight_gradients = false;  // of experts: behind those that the exchange waits for
};

struct TrainConfig {
  ModelConfig model = {};
  int64_t global_batch = 1024;  // tokens of all ranks in one step; any number of ranks shares them
  int num_micro_batches = 1;    // parts of it, whose gradients are summed in their order
  OverlapConfig overlap = {};
  int replicas = 0;  // of experts, places on each rank in every micro-batch
  uint64_t seed = 1;
  DType dtype = DType::kFloat32;  // of the rows that travel: kFloat32 or kBFloat16

  float learning_rate = 3e-3F;
  int64_t warmup_steps = 20;  // linear from zero
  float weight_decay = 0.01F;
  float beta1 = 0.9F;
  float beta2 = 0.99F;
  float epsilon = 1e-8F;

  std::string transport = "auto";
  int num_threads = 1;  // copying workers of each rank's exchange; 0: as the exchange sees fit
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
};

// Learning rate of step `step` (from 0).
[[nodiscard]] float learning_rate_at(const TrainConfig& config, int64_t step);

// A number that two configurations share if every field is equal that changes the result, or the
// order of the calls that ranks make together.
[[nodiscard]] uint64_t signature(const TrainConfig& config);

// Throws Error (kInvalidArgument) naming the field, its value and its bound.
void validate(const TrainConfig& config, int num_ranks);

}  // namespace weft::moe
