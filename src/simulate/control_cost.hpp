// SPDX-License-Identifier: Apache-2.0
// What a call costs before rows move: the words that all ranks tell each other, and a plan's counts
// and records.
#pragma once

#include "simulate/memory.hpp"
#include "simulate/model.hpp"

namespace weft::sim {

struct ControlCost {
  // Every rank tells every other rank by itself, as the executors do.
  int64_t word_messages = 0;       // of a rank over its card, each call
  double words_us = 0;             // of dispatch and combine
  double words_by_carrier_us = 0;  // one for each domain instead, passed on inside it
  double plan_words_us = 0;        // with counts
  double plan_local_us = 0;        // counting and placing this rank's routes
  double plan_records_us = 0;
  int64_t plan_bytes_out = 0;  // counts and records over the card of a rank

  [[nodiscard]] double plan_us() const { return plan_words_us + plan_local_us + plan_records_us; }
};

// Of the rank whose memory is given.
[[nodiscard]] ControlCost control_cost(
    const Scenario& scenario, const Model& model, const Memory& memory
);

}  // namespace weft::sim
