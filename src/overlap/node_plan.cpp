// SPDX-License-Identifier: Apache-2.0
#include "overlap/node_plan.hpp"

#include <utility>

#include "core/check.hpp"

namespace weft::overlap {

NodePlan::NodePlan(ChunkShared& shared, std::string name, Lane lane, Node node)
    : shared_(&shared), name_(std::move(name)), lane_(lane), node_(std::move(node)) {
  WEFT_CHECK_ARG(
      Context{},
      static_cast<bool>(node_.forward) == static_cast<bool>(node_.backward),
      "schedule: {} has only one of forward and backward (both or neither)",
      name_
  );
  WEFT_CHECK_ARG(
      Context{},
      node_.forward || !node_.weight_gradient,
      "schedule: {} has a weight gradient but no backward",
      name_
  );
  if (is_empty()) {
    return;
  }
  input_ = shared_->schedule->add_value(name_ + ".input", std::move(node_.release_input));
  saved_ = shared_->schedule->add_value(name_ + ".saved", std::move(node_.release_saved));
  gradient_ = shared_->schedule->add_value(name_ + ".gradient", std::move(node_.release_gradient));
}

void NodePlan::connect(int output, int input_gradient) {
  output_ = output;
  input_gradient_ = input_gradient;
}

void NodePlan::refuse_weight_gradient() const {
  WEFT_CHECK_ARG(
      Context{},
      !node_.weight_gradient,
      "schedule: {} has a weight gradient of its own (only pre_dispatch and mlp may defer it)",
      name_
  );
}

Step NodePlan::step(const char* direction, Work& work) const {
  Step made = {name_ + direction, lane_, shared_->micro_batch, std::exchange(work, {})};
  made.reads.push_back(shared_->state);
  return made;
}

void NodePlan::forward() {
  if (!node_.forward) {
    return;
  }
  Step made = step(".fwd", node_.forward);
  made.reads.push_back(input_);
  made.writes = {saved_, output_};
  if (node_.free_input) {
    made.frees = {input_};
  }
  shared_->schedule->add_step_on(std::move(made), shared_->event);
}

void NodePlan::backward() {
  if (!node_.backward) {
    return;
  }
  Step made = step(".bwd", node_.backward);
  made.reads.insert(made.reads.end(), {saved_, gradient_});
  if (!node_.free_input) {
    made.reads.push_back(input_);
  }
  if (input_gradient_ >= 0) {
    made.writes.push_back(input_gradient_);
  }
  if (owns_output_) {
    made.reads.push_back(output_);
    made.frees.push_back(output_);
  }
  if (!node_.weight_gradient) {
    free_rest(made);
  }
  shared_->schedule->add_step_on(std::move(made), shared_->event);
}

// Neither waits for the micro-batch nor moves its event: it comes after its backward on the same
// lane, and what follows need not wait for it.
void NodePlan::weight_gradient() {
  if (!node_.weight_gradient) {
    return;
  }
  Step made = step(".backward_dw", node_.weight_gradient);
  made.reads.insert(made.reads.end(), {saved_, gradient_});
  if (!node_.free_input) {
    made.reads.push_back(input_);
  }
  free_rest(made);
  shared_->schedule->add_step(std::move(made));
}

void NodePlan::free_rest(Step& step) const {
  step.frees.insert(step.frees.end(), {saved_, gradient_});
  if (!node_.free_input) {
    step.frees.push_back(input_);
  }
}

}  // namespace weft::overlap
