// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/check.hpp"
#include "core/env.hpp"
#include "weft/overlap.hpp"

namespace weft::overlap {
namespace {

using enum Action;
using enum NodeKind;

// Adds steps of one of the two micro-batches; none if it, or the layer, is not there.
struct Side {
  std::vector<PairStep>& steps;
  bool is_backward;
  bool is_there;
  int layer = -1;

  void operator()(Action action, NodeKind node = kPreProcess) const {
    if (is_there) {
      steps.push_back({is_backward, action, node, layer});
    }
  }
};

void add_layers(const Side& forward, const Side& backward, bool early_attention_release) {
  backward(kBackward, kMtpPostProcess);
  backward(kBackward, kMoeCombine);
  forward(kForward, kPreDispatch);
  backward(kBackward, kMlp);
  forward(kForward, kMoeDispatch);
  backward(kWeightGradient, kMlp);
  backward(kBackward, kMoeDispatch);
  if (early_attention_release) {
    backward(kBackward, kPreDispatch);
  }
  forward(kForward, kMlp);
  forward(kForward, kMoeCombine);
  if (!early_attention_release) {
    backward(kBackward, kPreDispatch);
  }
  forward(kForward, kMtpPostProcess);
  if (backward.layer > 0) {
    backward(kWeightGradient, kPreDispatch);
  }
  backward(kReleaseLayer);
}

void check_shape(const PipelineShape& shape) {
  WEFT_CHECK_ARG(
      Context{},
      shape.rank >= 0 && shape.rank < shape.num_ranks,
      "schedule: rank {} of a pipeline of {}",
      shape.rank,
      shape.num_ranks
  );
  WEFT_CHECK_ARG(
      Context{}, shape.num_chunks > 0, "schedule: {} chunks (at least 1)", shape.num_chunks
  );
  WEFT_CHECK_ARG(
      Context{},
      shape.num_micro_batches > 0 && shape.num_micro_batches % shape.num_ranks == 0,
      "schedule: {} micro-batches in a pipeline of {} ranks (a multiple of them)",
      shape.num_micro_batches,
      shape.num_ranks
  );
}

}  // namespace

std::vector<PairStep> pair_order(const PairShape& shape) {
  const int num_forward = shape.forward_layers.value_or(0);
  const int num_backward = shape.backward_layers.value_or(0);
  std::vector<PairStep> steps;
  const Side forward = {steps, false, shape.forward_layers.has_value()};
  const Side backward = {steps, true, shape.backward_layers.has_value()};
  forward(kPreForward);
  forward(kForward, kPreProcess);
  backward(kPreBackward);
  backward(kBackward, kPostProcess);
  backward(kWeightGradient, kPostProcess);
  for (int idx = 0; idx < std::max(num_forward, num_backward); ++idx) {
    add_layers(
        {steps, false, idx < num_forward, idx},
        {steps, true, idx < num_backward, num_backward - 1 - idx},
        shape.early_attention_release
    );
  }
  forward(kPostForward);
  backward(kPostBackward);
  // Left until here, so that it hides what kPostBackward sends.
  Side{steps, true, num_backward > 0, 0}(kWeightGradient, kPreDispatch);
  forward(kForward, kPostProcess);
  backward(kBackward, kPreProcess);
  backward(kWeightGradient, kPreProcess);
  forward(kJoin);
  backward(kJoin);
  backward(kRelease);
  return steps;
}

std::vector<StagePair> pipeline_order(const PipelineShape& shape) {
  check_shape(shape);
  std::vector<VirtualStage> stages;  // in the order of the forwards
  for (int first = 0; first < shape.num_micro_batches; first += shape.num_ranks) {
    for (int chunk = 0; chunk < shape.num_chunks; ++chunk) {
      for (int idx = 0; idx < shape.num_ranks; ++idx) {
        stages.push_back({first + idx, chunk});
      }
    }
  }
  const int until_first_backward =
      2 * (shape.num_ranks - shape.rank - 1) + (shape.num_chunks - 1) * shape.num_ranks;
  const size_t warm_up = std::min(static_cast<size_t>(until_first_backward) + 1, stages.size());
  std::vector<StagePair> pairs(stages.size() + warm_up);
  for (size_t idx = 0; idx < stages.size(); ++idx) {
    pairs[idx].forward = stages[idx];
    // Backwards are in the same order, from the last chunk to the first.
    pairs[warm_up + idx].backward = {
        stages[idx].micro_batch, shape.num_chunks - 1 - stages[idx].chunk};
  }
  return pairs;
}

// Measured on H200 (docs/overlap.md): 32 of 132 multiprocessors suffice for an exchange in case B
// to be as fast as with half as many more, and with 64 packing for copy engines costs little. Of
// other GPUs it is the same part.
int overlapped_sms(int num_gpu_sms, bool is_copied_dispatch) {
  return std::max(2, num_gpu_sms * (is_copied_dispatch ? 16 : 8) / 33 / 2 * 2);
}

// From so many elements of a token on, copy engines cost computation less (docs/overlap.md). Their
// room grows with the ranks, so with more than 8 they are not chosen.
bool overlapped_copies(int hidden, int num_ranks) {
  const CopyEngines choice = Env::read().copy_engines;
  const bool is_better = hidden >= 2048 && num_ranks <= 8;
  return choice == CopyEngines::kAlways || (choice == CopyEngines::kAuto && is_better);
}

}  // namespace weft::overlap
