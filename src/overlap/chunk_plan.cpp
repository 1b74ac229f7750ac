// SPDX-License-Identifier: Apache-2.0
#include "overlap/chunk_plan.hpp"

#include <array>
#include <utility>

#include "core/check.hpp"

namespace weft::overlap {

LayerPlan::LayerPlan(ChunkShared& shared, const std::string& name, LayerNodes nodes) {
  const std::array<Node*, kNumLayerNodes> in_order = {
      &nodes.pre_dispatch,
      &nodes.moe_dispatch,
      &nodes.mlp,
      &nodes.moe_combine,
      &nodes.mtp_post_process};
  for (size_t idx = 0; idx < kNumLayerNodes; ++idx) {
    const auto which = static_cast<LayerNode>(idx);
    nodes_.emplace_back(
        shared,
        fmt::format("{}.{}", name, kLayerNodeNames[idx]),
        lane_of(which),
        std::move(*in_order[idx])
    );
    if (which != LayerNode::kPreDispatch && which != LayerNode::kMlp) {
      nodes_.back().refuse_weight_gradient();
    }
  }
}

ChunkPlan::ChunkPlan(Schedule& schedule, ChunkNodes nodes, std::string name, int micro_batch)
    : shared_{&schedule, micro_batch},
      name_(std::move(name)),
      pre_process_(shared_, name_ + ".pre_process", Lane::kCompute, std::move(nodes.pre_process)),
      post_process_(
          shared_, name_ + ".post_process", Lane::kCompute, std::move(nodes.post_process)
      ),
      pre_forward_(std::move(nodes.pre_forward)),
      post_forward_(std::move(nodes.post_forward)),
      pre_backward_(std::move(nodes.pre_backward)),
      post_backward_(std::move(nodes.post_backward)) {
  shared_.state = schedule.add_value(name_ + ".state", std::move(nodes.release_state));
  pre_process_.refuse_weight_gradient();
  post_process_.refuse_weight_gradient();
  for (size_t idx = 0; idx < nodes.layers.size(); ++idx) {
    layers_.emplace_back(shared_, fmt::format("{}.L{}", name_, idx), std::move(nodes.layers[idx]));
  }
  connect_nodes(std::move(nodes.release_output));
}

std::deque<NodePlan*> ChunkPlan::chain() {
  std::deque<NodePlan*> found = {&pre_process_};
  for (LayerPlan& layer : layers_) {
    for (NodePlan& node : layer.nodes()) {
      found.push_back(&node);
    }
  }
  found.push_back(&post_process_);
  std::erase_if(found, [](const NodePlan* node) { return node->is_empty(); });
  return found;
}

void ChunkPlan::connect_nodes(Work release_output) {
  const std::deque<NodePlan*> nodes = chain();
  WEFT_CHECK_ARG(Context{}, !nodes.empty(), "schedule: {} has no nodes (at least one)", name_);
  const int output = shared_.schedule->add_value(name_ + ".output", std::move(release_output));
  for (size_t idx = 0; idx < nodes.size(); ++idx) {
    const bool is_last = idx + 1 == nodes.size();
    nodes[idx]->connect(
        is_last ? output : nodes[idx + 1]->input(), idx == 0 ? -1 : nodes[idx - 1]->gradient()
    );
  }
  nodes.back()->own_output();
  first_input_ = nodes.front()->input();
  last_gradient_ = nodes.back()->gradient();
  sent_output_ = post_process_.is_empty() ? output : post_process_.input();
  sent_gradient_ = pre_process_.is_empty() ? -1 : pre_process_.gradient();
}

Step ChunkPlan::hook(const char* name, Lane lane, Work& work) const {
  Step made = {name_ + name, lane, shared_.micro_batch, std::exchange(work, {})};
  made.reads = {shared_.state};
  return made;
}

// Brings the input.
void ChunkPlan::pre_forward() {
  if (pre_forward_) {
    Step made = hook(".pre_forward", Lane::kCompute, pre_forward_);
    made.writes = {first_input_};
    shared_.schedule->add_step_on(std::move(made), shared_.event);
  }
}

void ChunkPlan::post_forward() {
  if (post_forward_) {
    Step made = hook(".post_forward", Lane::kExchange, post_forward_);
    made.reads.push_back(sent_output_);
    shared_.schedule->add_step_after(std::move(made), shared_.event);
  }
}

// Brings the gradient of the output.
void ChunkPlan::pre_backward() {
  if (pre_backward_) {
    Step made = hook(".pre_backward", Lane::kCompute, pre_backward_);
    made.writes = {last_gradient_};
    shared_.schedule->add_step_on(std::move(made), shared_.event);
  }
}

void ChunkPlan::post_backward() {
  if (post_backward_) {
    Step made = hook(".post_backward", Lane::kCompute, post_backward_);
    if (sent_gradient_ >= 0) {
      made.reads.push_back(sent_gradient_);
    }
    shared_.schedule->add_step_after(std::move(made), shared_.event);
  }
}

void ChunkPlan::finish(const ChunkPlan* other) {
  Step made = {name_ + ".release_state", Lane::kCompute, shared_.micro_batch};
  if (other != nullptr && other->event().is_recorded()) {
    made.waits.push_back(other->event().step());
  }
  made.frees = {shared_.state};
  shared_.schedule->add_step_after(std::move(made), shared_.event);
}

void ChunkPlan::join() {
  shared_.schedule->add_step_after(
      {name_ + ".join", Lane::kCompute, shared_.micro_batch}, shared_.event
  );
}

}  // namespace weft::overlap
