// SPDX-License-Identifier: Apache-2.0
#include "lab/lanes/plain_nodes.hpp"

namespace weft::overlap::test {
namespace {

const Work kNothing = [](const LaneContext&) {};

Node node(bool is_there) {
  Node made;
  if (is_there) {
    made.forward = kNothing;
    made.backward = kNothing;
    made.release = kNothing;
  }
  return made;
}

}  // namespace

ChunkNodes plain_nodes(const PlainChunk& chunk) {
  ChunkNodes made;
  made.pre_process = node(chunk.has_ends);
  for (int idx = 0; idx < chunk.num_layers; ++idx) {
    LayerNodes& layer = made.layers.emplace_back(LayerNodes{
        node(true), node(chunk.is_moe), node(true), node(chunk.is_moe)});
    if (chunk.defer_weight_gradients) {
      layer.pre_dispatch.weight_gradient = kNothing;
      layer.mlp.weight_gradient = kNothing;
    }
  }
  made.post_process = node(chunk.has_ends);
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
