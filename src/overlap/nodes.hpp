// SPDX-License-Identifier: Apache-2.0
// What the caller gives for one micro-batch: callbacks by layer and node. Used once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "overlap/lane.hpp"

namespace weft::overlap {

// A node without callbacks takes no step: its neighbours pass their values to each other.
struct Node {
  Work forward = {};
  Work backward = {};
  // Only for pre_dispatch and mlp, when weight gradients are deferred: runs after the backward,
  // which then makes the gradient of the input alone.
  Work weight_gradient = {};
  // The input is not needed after the forward and goes then; else with what is saved.
  bool free_input = false;

  Work release_input = {};
  // What the forward saved; goes after the last of backward and weight gradient.
  Work release_saved = {};
  // The gradient of the output; goes at the same time.
  Work release_gradient = {};
};

enum class LayerNode : uint8_t { kPreDispatch, kMoeDispatch, kMlp, kMoeCombine, kMtpPostProcess };

inline constexpr size_t kNumLayerNodes = 5;
inline constexpr std::array<std::string_view, kNumLayerNodes> kLayerNodeNames = {
    "pre_dispatch", "moe_dispatch", "mlp", "moe_combine", "mtp_post_process"};

// The exchange moves tokens in moe_dispatch and moe_combine; the rest computes.
[[nodiscard]] constexpr Lane lane_of(LayerNode node) {
  const bool exchanges = node == LayerNode::kMoeDispatch || node == LayerNode::kMoeCombine;
  return exchanges ? Lane::kExchange : Lane::kCompute;
}

// A dense layer has neither moe_dispatch nor moe_combine; only a layer that predicts several tokens
// has mtp_post_process.
struct LayerNodes {
  Node pre_dispatch = {};
  Node moe_dispatch = {};
  Node mlp = {};
  Node moe_combine = {};
  Node mtp_post_process = {};
};

// The layers of one stage for one micro-batch. The hooks are where a pipeline sends and receives.
struct ChunkNodes {
  Node pre_process = {};
  std::vector<LayerNodes> layers = {};
  Node post_process = {};

  Work pre_forward = {};    // compute lane, before everything
  Work post_forward = {};   // exchange lane, after the last layer; hides under what computes
  Work pre_backward = {};   // compute lane, before the backward of post_process
  Work post_backward = {};  // compute lane, after the backward of the first layer

  Work release_output = {};  // what the last node's forward returns; goes after its backward
  Work release_state = {};   // what nodes pass each other besides; goes when the backward is over
};

}  // namespace weft::overlap
