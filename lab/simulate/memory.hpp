// SPDX-License-Identifier: Apache-2.0
// Memory of a rank beside its tensors, by the formulas that the executors allocate by.
#pragma once

#include <cstdint>

#include "simulate/scenario.hpp"
#include "simulate/traffic.hpp"

namespace weft::sim {

// Bytes of one rank. A carrier's rows are those of other domains, should all of them wait there.
struct Memory {
  uint64_t output = 0;  // the rows themselves
  uint64_t carrier = 0;

  struct Cpu {
    uint64_t signals = 0;
    uint64_t words = 0;         // call words with counts
    uint64_t records = 0;       // room for the records of every peer, were all its tokens for here
    uint64_t records_used = 0;  // what this routing writes there
    uint64_t staging = 0;       // where outputs are ordinary memory

    [[nodiscard]] uint64_t control() const { return words + records; }
  } cpu;

  // Of the domain alone. Among several a rank has the CPU's signals, words and records as well.
  struct Gpu {
    uint64_t signals = 0;
    uint64_t words = 0;
    uint64_t weights = 0;  // of every peer's routes, were all its tokens for here; and early rows
    uint64_t plan = 0;     // of each plan that is alive: a block for each round
    // For rows between GPUs and, among several domains, for all that may cross on their way.
    uint64_t staging = 0;
    uint64_t host = 0;  // of staging, what is pinned in the host's memory

    [[nodiscard]] uint64_t control() const { return signals + words + weights; }
  } gpu;
};

// What does not depend on the routing; the rest is 0.
[[nodiscard]] Memory reserved_memory(const Scenario& scenario);
[[nodiscard]] Memory memory_of(const Scenario& scenario, const Traffic& traffic, int rank);

}  // namespace weft::sim
