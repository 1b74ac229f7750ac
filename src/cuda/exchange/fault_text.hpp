// SPDX-License-Identifier: Apache-2.0
// What a fault record of a GPU says, for whoever reads the exception. Needs no GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/layout/control.hpp"

namespace weft {

// What the host finds in control regions after a fault: tells a peer that wrote nothing from one
// that wrote elsewhere, and memory from what a kernel saw of it.
struct ControlSurvey {
  std::vector<uint32_t> words =
      {};                    // [num_ranks] signals of the call's words in this rank's region
  uint64_t stamp = 0;        // in this rank's region
  std::string refusal = {};  // why the peer refused, if it said so
};

// Number of a call as its caller counts it, of the epoch that `me`'s exchange gave it.
[[nodiscard]] uint32_t call_number(const RankView& me, uint32_t epoch);
[[nodiscard]] std::string fault_text(
    const FaultRecord& fault, const RankView& me, const ControlSurvey& survey = {}
);

}  // namespace weft
