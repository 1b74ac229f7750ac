// SPDX-License-Identifier: Apache-2.0
// How long a dispatch or a combine takes: its chunks go through links, cards, proxies and copies,
// each of which serves one chunk at a time, in the order in which they come. schedule.hpp says
// which chunks there are; replay_clock.hpp keeps the time.
#pragma once

#include <string_view>

#include "simulate/model.hpp"
#include "simulate/schedule.hpp"
#include "simulate/traffic.hpp"

namespace weft::sim {

// Times are of the rank that is busiest.
struct BusyTimes {
  double link_us = 0;  // out or in
  double card_us = 0;  // out or in
  double proxy_us = 0;
  double copy_us = 0;  // fan-out, sums, a rank's own rows
};

struct ReplayTimes {
  double us = 0;  // until the last rank has all its rows
  BusyTimes busy;

  // What is busy longest: "links", "cards", "proxies" or "copies".
  [[nodiscard]] std::string_view bound() const;
};

[[nodiscard]] ReplayTimes replay_dispatch(
    const Scenario& scenario, const Model& model, const Schedule& schedule
);

// Chunks of domains that are not replayed are ready to cross at an even pace over the time in which
// their forwarder's links and copies could have made them.
[[nodiscard]] ReplayTimes replay_combine(
    const Scenario& scenario, const Model& model, const Schedule& schedule, const Traffic& traffic
);

// Least time of a rank's links and copies, in microseconds.
[[nodiscard]] double domain_load_us(
    const Scenario& scenario, const Model& model, const RankTraffic& rank
);

}  // namespace weft::sim
