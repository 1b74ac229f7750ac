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
  }
  return made;
}

}  // namespace

ChunkNodes plain_nodes(const PlainChunk& chunk) {
  ChunkNodes made = {chunk.num_layers};
  made.at(NodeKind::kPreProcess) = node(chunk.has_ends);
  for (int idx = 0; idx < chunk.num_layers; ++idx) {
    for (const NodeKind kind : {NodeKind::kPreDispatch, NodeKind::kMlp}) {
      made.at(kind, idx) = node(true);
      if (chunk.defer_weight_gradients) {
        made.at(kind, idx).weight_gradient = kNothing;
      }
    }
    made.at(NodeKind::kMoeDispatch, idx) = node(chunk.is_moe);
    made.at(NodeKind::kMoeCombine, idx) = node(chunk.is_moe);
  }
  made.at(NodeKind::kPostProcess) = node(chunk.has_ends);
  return made;
}

std::vector<std::string> step_names(const Schedule& schedule) {
  std::vector<std::string> names;
  for (const Step& step : schedule) {
    names.push_back(step.name);
  }
  return names;
}

std::vector<std::string> step_names(const Schedule& schedule, Lane lane) {
  std::vector<std::string> names;
  for (const Step& step : schedule) {
    if (step.lane == lane) {
      names.push_back(step.name);
    }
  }
  return names;
}

}  // namespace weft::overlap::test
