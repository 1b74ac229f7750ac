// SPDX-License-Identifier: Apache-2.0
#include "train/lanes/schedule.hpp"

#include <fmt/format.h>

#include <deque>
#include <utility>

namespace weft::overlap {
namespace {

// One micro-batch on its way into a schedule. All its steps but weight gradients follow one
// another.
class MicroBatch {
 public:
  MicroBatch(Schedule& schedule, ChunkNodes nodes, int number)
      : schedule_(schedule), nodes_(std::move(nodes)), number_(number) {}

  [[nodiscard]] int num_layers() const { return nodes_.num_layers; }

  void issue(const PairStep& step) {
    switch (step.action) {
      case Action::kForward:
        return follow(step, "fwd", node(step).forward);
      case Action::kBackward:
        return follow(step, "bwd", node(step).backward);
      case Action::kWeightGradient:
        if (node(step).weight_gradient) {  // behind its backward on the same lane
          schedule_.push_back(taken(step, "backward_dw", node(step).weight_gradient));
        }
        return;
      case Action::kJoin:
        schedule_.push_back(
            {fmt::format("{}.join.{}", name(), step.is_backward ? "bwd" : "fwd"),
             Lane::kCompute,
             number_,
             {},
             {last_}}
        );
        return;
      default:  // there is no pipeline, and nodes keep what they hold
        return;
    }
  }

 private:
  [[nodiscard]] std::string name() const { return fmt::format("m{}", number_); }

  Node& node(const PairStep& step) { return nodes_.at(step.node, step.layer); }

  Step taken(const PairStep& step, const char* direction, Work& work) {
    const std::string layer = step.layer < 0 ? "" : fmt::format(".L{}", step.layer);
    return {
        fmt::format("{}{}.{}.{}", name(), layer, node_name(step.node), direction),
        lane_of(step.node),
        number_,
        std::move(work)};
  }

  void follow(const PairStep& step, const char* direction, Work& work) {
    if (work) {
      Step next = taken(step, direction, work);
      if (last_ >= 0) {
        next.waits = {last_};
      }
      last_ = static_cast<int>(schedule_.size());
      schedule_.push_back(std::move(next));
    }
  }

  Schedule& schedule_;
  ChunkNodes nodes_;
  int number_;
  int last_ = -1;  // the step that the micro-batch has reached
};

}  // namespace

Schedule make_schedule(
    const MicroBatches& batches, const std::vector<StagePair>& pairs, bool early_attention_release
) {
  Schedule schedule;
  std::deque<MicroBatch> all;
  for (int idx = 0; idx < batches.num; ++idx) {
    all.emplace_back(schedule, batches.nodes(idx), idx);
  }
  const auto find = [&](const std::optional<VirtualStage>& stage) {
    return stage ? &all.at(static_cast<size_t>(stage->micro_batch)) : nullptr;
  };
  for (const StagePair& pair : pairs) {
    MicroBatch* const forward = find(pair.forward);
    MicroBatch* const backward = find(pair.backward);
    const auto layers = [](const MicroBatch* one) {
      return one == nullptr ? std::nullopt : std::optional(one->num_layers());
    };
    for (const PairStep& step :
         pair_order({layers(forward), layers(backward), early_attention_release})) {
      (step.is_backward ? backward : forward)->issue(step);
    }
  }
  return schedule;
}

Schedule schedule_overlapped(const MicroBatches& batches) {
  return make_schedule(batches, pipeline_order({.num_micro_batches = batches.num}));
}

void run_in_turn(const MicroBatches& batches) {
  std::vector<StagePair> pairs;
  for (int idx = 0; idx < batches.num; ++idx) {
    pairs.push_back({.forward = VirtualStage{idx, 0}});
    pairs.push_back({.backward = VirtualStage{idx, 0}});
  }
  for (const Step& step : make_schedule(batches, pairs)) {
    if (step.work) {
      step.work({step.lane});
    }
  }
}

}  // namespace weft::overlap
