// SPDX-License-Identifier: Apache-2.0
#include "moe/lane_phases_cuda.hpp"

#include <utility>

#include "core/check_cuda.hpp"

namespace weft::moe {

void LanePhases::mark(overlap::Lane lane, std::optional<Phase> phase, cudaStream_t stream) {
  EventOwner event;
  if (unused_.empty()) {
    cudaEvent_t made = nullptr;
    WEFT_CUDA(Context{}, cudaEventCreate(&made));
    event.reset(made);
  } else {
    event = std::move(unused_.back());
    unused_.pop_back();
  }
  WEFT_CUDA(Context{}, cudaEventRecord(event.get(), stream));
  marks_[overlap::lane_idx(lane)].push_back({std::move(event), phase});
}

void LanePhases::read(overlap::Lane lane, PhaseTimer& timer) {
  std::vector<Mark>& marks = marks_[overlap::lane_idx(lane)];
  for (size_t i = 0; i + 1 < marks.size(); ++i) {
    if (marks[i].phase) {
      float ms = 0;
      WEFT_CUDA(
          Context{}, cudaEventElapsedTime(&ms, marks[i].event.get(), marks[i + 1].event.get())
      );
      timer.add(*marks[i].phase, static_cast<double>(ms) / 1e3);
    }
  }
  for (Mark& mark : marks) {
    unused_.push_back(std::move(mark.event));
  }
  marks.clear();
}

}  // namespace weft::moe
