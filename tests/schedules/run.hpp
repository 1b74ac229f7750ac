// SPDX-License-Identifier: Apache-2.0
// One run of random calls among ranks whose order, network and misfortune a seed decides.
#pragma once

#include <cstdint>
#include <string>

#include "schedules/scheduler.hpp"

namespace weft::test {

struct ScheduledRun {
  std::string story;    // what went wrong on purpose, and what came of it on each rank
  std::string failure;  // what must not be: wrong bits, an error without a cause or a name, a hang
  uint64_t trace = 0;   // of all decisions

  bool operator==(const ScheduledRun&) const = default;
};

// Makes the run of a seed; the same seed gives the same run.
[[nodiscard]] ScheduledRun run_schedule(uint64_t seed, Planted planted = Planted::kNothing);

}  // namespace weft::test
