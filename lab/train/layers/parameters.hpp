// SPDX-License-Identifier: Apache-2.0
// Which parameters a model has, and where a rank keeps those it stores: two flat vectors, one of
// the replicated parameters, equal on all ranks, one of its own experts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "train/config.hpp"
#include "train/layers/matrix.hpp"

namespace weft::moe {

// A run of elements in one of the flat vectors.
struct ParameterSpan {
  size_t begin = 0;
  size_t size = 0;
  // Number of its first element among all elements of the model, the same for any number of ranks:
  // decides the initial values and the place in a checkpoint.
  uint64_t model_begin = 0;
  float centre = 0;  // initial values are uniform in centre +- spread
  float spread = 0;

  [[nodiscard]] Parameter in(const Parameter& flat) const {
    return {flat.value.subspan(begin, size), flat.grad.subspan(begin, size), flat.grad_stride};
  }
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
