// SPDX-License-Identifier: Apache-2.0
#include "overlap/plain_nodes.hpp"

namespace weft::overlap::test {
namespace {

const Work kNothing = [](const LaneContext&) {};

Node node(bool is_there) {
  Node made;
  if (is_there) {
    made.forward = kNothing;
    made.backward = kNothing;
  }
  return made;
}

LayerNodes layer(const PlainChunk& chunk) {
  const bool exchanges = chunk.kind != Kind::kDense;
  LayerNodes made = {
      node(true), node(exchanges), node(true), node(exchanges), node(chunk.kind == Kind::kMtp)};
  if (chunk.defer_weight_gradients) {
    made.pre_dispatch.weight_gradient = kNothing;
    made.mlp.weight_gradient = kNothing;
  }
  return made;
}

}  // namespace

ChunkNodes plain_nodes(const PlainChunk& chunk) {
  ChunkNodes made;
  made.pre_process = node(chunk.has_ends);
  for (int idx = 0; idx < chunk.num_layers; ++idx) {
    made.layers.push_back(layer(chunk));
  }
  made.post_process = node(chunk.has_ends);
  if (chunk.has_hooks) {
    made.pre_forward = kNothing;
    made.post_forward = kNothing;
    made.pre_backward = kNothing;
    made.post_backward = kNothing;
  }
  return made;
}

std::vector<std::string> step_names(const Schedule& schedule) {
  std::vector<std::string> names;
  for (const Step& step : schedule.steps()) {
    names.push_back(step.name);
  }
  return names;
}

std::vector<std::string> step_names(const Schedule& schedule, Lane lane) {
  std::vector<std::string> names;
  for (const Step& step : schedule.steps()) {
    if (step.lane == lane) {
      names.push_back(step.name);
    }
  }
  return names;
}

}  // namespace weft::overlap::test
