// SPDX-License-Identifier: Apache-2.0
#include "overlap/chunk_order.hpp"

#include <algorithm>

namespace weft::overlap {
namespace {

void issue_all_layers(ChunkPlan* forward, ChunkPlan* backward, const OverlapOptions& options) {
  const int num_forward = forward != nullptr ? forward->num_layers() : 0;
  const int num_backward = backward != nullptr ? backward->num_layers() : 0;
  const int num_pairs = std::min(num_forward, num_backward);
  const auto backward_layer = [&](int idx) { return &backward->layer(num_backward - 1 - idx); };
  const auto is_last = [&](int idx) { return idx == num_backward - 1; };
  for (int idx = 0; idx < num_pairs; ++idx) {
    issue_layers(&forward->layer(idx), backward_layer(idx), is_last(idx), options);
  }
  for (int idx = num_pairs; idx < num_backward; ++idx) {
    issue_layers(nullptr, backward_layer(idx), is_last(idx), options);
  }
  for (int idx = num_pairs; idx < num_forward; ++idx) {
    issue_layers(&forward->layer(idx), nullptr, false, options);
  }
}

}  // namespace

void issue_chunks(ChunkPlan* forward, ChunkPlan* backward, const OverlapOptions& options) {
  if (forward != nullptr) {
    forward->pre_forward();
    forward->pre_process().forward();
  }
  if (backward != nullptr) {
    backward->pre_backward();
    backward->post_process().backward();
  }
  issue_all_layers(forward, backward, options);
  if (forward != nullptr) {
    forward->post_forward();
  }
  if (backward != nullptr) {
    backward->post_backward();
    if (backward->num_layers() > 0) {
      // Left for here so that it hides what post_backward sends.
      backward->layer(0).node(LayerNode::kPreDispatch).weight_gradient();
    }
  }
  if (forward != nullptr) {
    forward->post_process().forward();
  }
  if (backward != nullptr) {
    backward->pre_process().backward();
    backward->finish(forward);
  } else if (forward != nullptr) {
    forward->join();
  }
}

}  // namespace weft::overlap
