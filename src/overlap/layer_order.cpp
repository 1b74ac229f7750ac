// SPDX-License-Identifier: Apache-2.0
#include "overlap/layer_order.hpp"

namespace weft::overlap {

void issue_layers(
    LayerPlan* forward, LayerPlan* backward, bool is_last_in_backward, const OverlapOptions& options
) {
  const auto issue_forward = [&](LayerNode node) {
    if (forward != nullptr) {
      forward->node(node).forward();
    }
  };
  const auto issue_backward = [&](LayerNode node) {
    if (backward != nullptr) {
      backward->node(node).backward();
    }
  };
  const auto issue_weight_gradient = [&](LayerNode node) {
    if (backward != nullptr) {
      backward->node(node).weight_gradient();
    }
  };

  issue_backward(LayerNode::kMtpPostProcess);
  issue_backward(LayerNode::kMoeCombine);
  issue_forward(LayerNode::kPreDispatch);
  issue_backward(LayerNode::kMlp);
  issue_forward(LayerNode::kMoeDispatch);
  issue_weight_gradient(LayerNode::kMlp);
  issue_backward(LayerNode::kMoeDispatch);
  if (options.early_attention_release) {
    issue_backward(LayerNode::kPreDispatch);
  }
  issue_forward(LayerNode::kMlp);
  issue_forward(LayerNode::kMoeCombine);
  if (!options.early_attention_release) {
    issue_backward(LayerNode::kPreDispatch);
  }
  issue_forward(LayerNode::kMtpPostProcess);
  if (!is_last_in_backward) {
    issue_weight_gradient(LayerNode::kPreDispatch);
  }
}

}  // namespace weft::overlap
