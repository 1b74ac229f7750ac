// SPDX-License-Identifier: Apache-2.0
// PhaseTimer for work that is queued on two streams: marks between the kernels, read when all is
// over.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "moe/phase_timer.hpp"
#include "overlap/lane.hpp"

namespace weft::moe {

class LanePhases {
 public:
  // What the stream comes to from here on is this phase; none: no phase's.
  void mark(overlap::Lane lane, std::optional<Phase> phase, cudaStream_t stream);
  // Adds what was marked on a lane, whose stream must be through, and forgets it.
  void read(overlap::Lane lane, PhaseTimer& timer);

 private:
  struct EventEnd {
    void operator()(cudaEvent_t event) const { static_cast<void>(cudaEventDestroy(event)); }
  };
  using EventOwner = std::unique_ptr<CUevent_st, EventEnd>;

  struct Mark {
    EventOwner event;
    std::optional<Phase> phase;
  };

  std::array<std::vector<Mark>, overlap::kNumLanes> marks_;
  std::vector<EventOwner> unused_;
};

}  // namespace weft::moe
