// SPDX-License-Identifier: Apache-2.0
// One exchange of any size: counts for all ranks (traffic.hpp), times (replay.hpp), memory and
// messages of the busiest (memory.cpp). command/report.cpp prints them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "simulate/model.hpp"
#include "simulate/replay.hpp"
#include "simulate/traffic.hpp"

namespace weft::sim {

// Bytes of one rank other than its tensors, by the formulas that the executors allocate by. A
// forwarder's rows are those of other domains, should all of them wait there.
struct Memory {
  uint64_t output = 0;  // the rows themselves
  uint64_t forwarder = 0;

  struct Cpu {
    uint64_t signals = 0;
    uint64_t words = 0;         // handshakes with counts
    uint64_t records = 0;       // room for the records of every peer, were all its tokens for here
    uint64_t records_used = 0;  // what this routing writes there
    uint64_t staging = 0;       // where outputs are ordinary memory

    [[nodiscard]] uint64_t control() const { return words + records; }
  } cpu;

  // Only of the domain. Among several a rank has the CPU's signals, words and records as well.
  struct Gpu {
    uint64_t signals = 0;
    uint64_t words = 0;
    uint64_t weights = 0;  // of every peer's routes, were all its tokens for here; and eager rows
    uint64_t plan = 0;     // of each plan that is alive: a block for each round
    // For rows between GPUs and, among several domains, for all that may cross on their way.
    uint64_t staging = 0;
    uint64_t host = 0;  // of staging, what is pinned in the host's memory

    [[nodiscard]] uint64_t control() const { return signals + words + weights; }
  } gpu;
};

// Returns the memory that does not depend on the routing; the rest is 0.
[[nodiscard]] Memory reserved_memory(const Scenario& scenario);
[[nodiscard]] Memory memory_of(const Scenario& scenario, const Traffic& traffic, int rank);

// Costs of a call before rows move: the handshakes that all ranks tell each other, and a plan's
// counts and records.
struct ControlCost {
  // Every rank tells every other rank by itself, as the executors do.
  int64_t word_messages = 0;         // of a rank over its card, each call
  double words_us = 0;               // of dispatch and combine
  double words_by_forwarder_us = 0;  // one for each domain instead, passed on inside it
  double plan_words_us = 0;          // with counts
  double plan_local_us = 0;          // counting and placing this rank's routes
  double plan_records_us = 0;
  int64_t plan_bytes_out = 0;  // counts and records over the card of a rank

  [[nodiscard]] double plan_us() const { return plan_words_us + plan_local_us + plan_records_us; }
};

// Returns what calls of a rank cost before rows move; `memory` is that rank's.
[[nodiscard]] ControlCost control_cost(
    const Scenario& scenario, const Model& model, const Memory& memory
);

struct Simulation {
  Scenario scenario;
  Traffic traffic;
  RankTraffic mean;      // over the ranks, rounded
  RankTraffic most;      // each number of the rank that has most of it
  int busiest_rank = 0;  // of links, cards and copies together
  int num_replayed = 0;  // domains whose links and copies are replayed
  Memory memory;         // of the busiest rank
  ControlCost control;   // likewise
  ReplayTimes dispatch_rows;
  ReplayTimes combine_rows;
  double dispatch_us = 0;  // with words and what every call costs
  double combine_us = 0;
};

// Parts of chunks that are replayed at most; where there would be more, only the domain of the
// busiest rank is replayed in full, and of the others their cards.
inline constexpr int64_t kMostParts = int64_t{1} << 22;

// `routes` by rank. `told` hears the share of the work that is done. Throws what count_traffic()
// throws.
[[nodiscard]] Simulation simulate(
    const Scenario& scenario,
    const Model& model,
    std::span<const RouteTable> routes,
    const std::function<void(double)>& told = [](double) {},
    int64_t most_parts = kMostParts
);

}  // namespace weft::sim
