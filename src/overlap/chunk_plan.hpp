// SPDX-License-Identifier: Apache-2.0
// The nodes of one micro-batch, joined to a chain of values and one event.
#pragma once

#include <deque>
#include <string>

#include "overlap/node_plan.hpp"
#include "overlap/nodes.hpp"
#include "overlap/schedule.hpp"

namespace weft::overlap {

// The nodes of one layer, in the order of LayerNode.
class LayerPlan {
 public:
  LayerPlan(ChunkShared& shared, const std::string& name, LayerNodes nodes);

  [[nodiscard]] NodePlan& node(LayerNode node) { return nodes_[static_cast<size_t>(node)]; }
  [[nodiscard]] std::deque<NodePlan>& nodes() { return nodes_; }

 private:
  std::deque<NodePlan> nodes_;
};

// Issues the steps of one chunk in the order it is told. All steps but weight gradients and
// post-hooks follow one another through the chunk's event.
class ChunkPlan {
 public:
  // Steps are named "<name>.L<layer>.<node>.<direction>". The schedule outlives the plan. Throws
  // Error (kInvalidArgument) for a chunk without any node.
  ChunkPlan(Schedule& schedule, ChunkNodes nodes, std::string name, int micro_batch);
  ChunkPlan(const ChunkPlan&) = delete;  // its nodes point to it
  ChunkPlan& operator=(const ChunkPlan&) = delete;

  [[nodiscard]] int num_layers() const { return static_cast<int>(layers_.size()); }
  [[nodiscard]] LayerPlan& layer(int idx) { return layers_[static_cast<size_t>(idx)]; }
  [[nodiscard]] NodePlan& pre_process() { return pre_process_; }
  [[nodiscard]] NodePlan& post_process() { return post_process_; }
  [[nodiscard]] const Event& event() const { return shared_.event; }

  // Each issues the step of its hook; nothing if it is not given.
  void pre_forward();
  void post_forward();
  void pre_backward();
  void post_backward();

  // Makes the compute lane wait for this chunk, whose backward is over, and for another one (null:
  // none), then releases the state.
  void finish(const ChunkPlan* other);
  // Makes the compute lane wait for this chunk, whose forward is over.
  void join();

 private:
  [[nodiscard]] std::deque<NodePlan*> chain();
  void connect_nodes(Work release_output);
  [[nodiscard]] Step hook(const char* name, Lane lane, Work& work) const;

  ChunkShared shared_;
  std::string name_;
  NodePlan pre_process_;
  std::deque<LayerPlan> layers_;
  NodePlan post_process_;
  Work pre_forward_;
  Work post_forward_;
  Work pre_backward_;
  Work post_backward_;
  int first_input_ = -1;  // values
  int last_gradient_ = -1;
  int sent_output_ = -1;    // what post_forward passes on
  int sent_gradient_ = -1;  // what post_backward passes on; -1: the caller's own business
};

}  // namespace weft::overlap
