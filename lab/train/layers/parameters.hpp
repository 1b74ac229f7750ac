// SPDX-License-Identifier: Apache-2.0
// Parameters of a model, and where a rank keeps those it stores: two flat vectors, one of the
// replicated parameters, equal on all ranks, one of its own experts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "train/batch.hpp"

namespace weft::moe {

struct ModelConfig;

inline constexpr int kNumBytes = 256;  // values of a byte

// Learned elements and the gradient that backward adds to, one for each shard
// of the rank's tokens where tokens are the rank's own.
struct Parameter {
  std::span<float> value;
  std::span<float> grad;   // of the first shard
  size_t grad_stride = 0;  // from one shard's to the next

  [[nodiscard]] std::span<float> grad_of(size_t shard) const {
    return {grad.data() + shard * grad_stride, grad.size()};
  }
};

// A run of elements in one of the flat vectors.
struct ParameterSpan {
  size_t begin = 0;
  size_t size = 0;
  // Number of its first element among all elements of the model, the same for any number of ranks:
  // decides the initial values and the place in a checkpoint.
  uint64_t model_begin = 0;
  float centre = 0;  // initial values are uniform in centre +- spread
  float spread = 0;
};

// A learned matrix or vector.
struct Weight {
  const float* value = nullptr;
  float* grad = nullptr;   // of the first shard; backward adds to it
  size_t grad_stride = 0;  // from one shard's to the next

  [[nodiscard]] float* grad_of(size_t shard) const { return grad + shard * grad_stride; }
  // A part of a flat vector.
  [[nodiscard]] Weight at(const ParameterSpan& span) const {
    return {value + span.begin, grad + span.begin, grad_stride};
  }
};

// The two flat vectors.
struct Weights {
  Weight replicated;
  Weight experts;
};

struct BlockLayout {
  ParameterSpan norm;         // [hidden]
  ParameterSpan router;       // [num_experts, hidden]
  ParameterSpan experts_in;   // [num_local_experts, 2 * expert_hidden, hidden]
  ParameterSpan experts_out;  // [num_local_experts, hidden, expert_hidden]
};

struct ModelLayout {
  ParameterSpan embedding;   // [window, kNumBytes, hidden]
  ParameterSpan head;        // [kNumBytes, hidden]
  ParameterSpan final_norm;  // [hidden]
  std::vector<BlockLayout> blocks;

  size_t num_decayed = 0;     // replicated elements with weight decay come first
  size_t num_replicated = 0;  // on every rank
  size_t num_expert = 0;      // of this rank's experts
  uint64_t num_model = 0;     // of the whole model

  [[nodiscard]] std::vector<ParameterSpan> replicated() const;
  [[nodiscard]] std::vector<ParameterSpan> experts() const;
};

// The two flat vectors with their gradients.
struct ModelMemory {
  Parameter replicated;  // [num_replicated]
  Parameter experts;     // [num_expert]
};

[[nodiscard]] ModelLayout make_layout(const ModelConfig& config, int rank, int num_ranks);

void initialise(std::span<const ParameterSpan> spans, uint64_t seed, std::span<float> values);

}  // namespace weft::moe
