// SPDX-License-Identifier: Apache-2.0
// Text of a GPU's fault record, for the message of the exception. Needs no GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/layout/control.hpp"

namespace weft {

// Contents of control regions as the host finds them after a fault: they tell a peer that wrote
// nothing from one that wrote elsewhere, and memory from what a kernel saw of it.
struct ControlSurvey {
  std::vector<uint32_t> words =
      {};                    // [num_ranks] signals of the call's words in this rank's region
  uint64_t stamp = 0;        // in this rank's region
  std::string refusal = {};  // why the peer refused, if it said so
};

// Returns the number by which a caller counts the call to which `me`'s exchange gave `epoch`.
[[nodiscard]] uint32_t call_number(const RankView& me, uint32_t epoch);
[[nodiscard]] std::string fault_text(
    const FaultRecord& fault, const RankView& me, const ControlSurvey& survey = {}
);

}  // namespace weft
