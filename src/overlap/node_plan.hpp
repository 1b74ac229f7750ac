// SPDX-License-Identifier: Apache-2.0
// One node of one micro-batch, on its way into a schedule.
#pragma once

#include <string>

#include "overlap/nodes.hpp"
#include "overlap/schedule.hpp"

namespace weft::overlap {

// What all nodes of a chunk share.
struct ChunkShared {
  Schedule* schedule = nullptr;
  int micro_batch = -1;
  int state = -1;  // value
  Event event = {};
};

class NodePlan {
 public:
  // `name` without the direction: "m0.L1.mlp". Throws Error (kInvalidArgument) if only one of
  // forward and backward is given.
  NodePlan(ChunkShared& shared, std::string name, Lane lane, Node node);

  [[nodiscard]] bool is_empty() const { return !node_.forward; }
  [[nodiscard]] int input() const { return input_; }
  [[nodiscard]] int gradient() const { return gradient_; }

  // The values that the forward's result and the gradient of the input go to; -1: no node takes the
  // gradient.
  void connect(int output, int input_gradient);
  // No later node takes the output: it goes after the backward of this one.
  void own_output() { owns_output_ = true; }
  // Throws Error (kInvalidArgument) if there is one.
  void refuse_weight_gradient() const;

  // Each issues its step; nothing if there is no such callback.
  void forward();
  void backward();
  void weight_gradient();

 private:
  [[nodiscard]] Step step(const char* direction, Work& work) const;
  void free_rest(Step& step) const;

  ChunkShared* shared_;
  std::string name_;
  Lane lane_;
  Node node_;
  int input_ = -1;
  int saved_ = -1;
  int gradient_ = -1;
  int output_ = -1;
  int input_gradient_ = -1;
  bool owns_output_ = false;
};

}  // namespace weft::overlap
