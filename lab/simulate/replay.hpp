// SPDX-License-Identifier: Apache-2.0
// How long a dispatch or a combine takes: its chunks go through links, cards, proxies and copies,
// each of which serves one chunk at a time, in the order in which they come. The transfers of one
// dispatch are chunks of rows to a rank, made from the counts of traffic.hpp (schedule.cpp);
// combine runs through the same chunks backwards.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "simulate/model.hpp"
#include "simulate/traffic.hpp"

namespace weft::sim {

// Rows that a chunk brings to one rank of the target's domain.
struct Part {
  uint32_t chunk = 0;
  int32_t rank = 0;
  int32_t rows = 0;    // arrivals
  int32_t routes = 0;  // of these arrivals on that rank
};

struct Chunk {
  int32_t source = 0;
  int32_t target = 0;  // over the card: the forwarder, which forwards
  int32_t index = 0;   // among the chunks of (source, target)
  int32_t rows = 0;
  uint32_t first_part = 0;
  uint32_t num_parts = 0;  // 0 where the target's domain is not replayed
};

// A rank's chunks are sent in this order: first the first chunk to every target, beginning with the
// next higher one, then the second, as the executors do.
struct Schedule {
  std::vector<Chunk> card_chunks;    // across domains, by source
  std::vector<Chunk> link_chunks;    // inside replayed domains, by source; to itself included
  std::vector<uint32_t> link_begin;  // [num_ranks + 1]
  std::vector<Part> card_parts;
  std::vector<Part> link_parts;
  std::vector<bool> is_replayed;  // [num_domains] in full: links and copies too

  [[nodiscard]] std::span<const Part> parts_of(const Chunk& chunk) const {
    return std::span(card_parts).subspan(chunk.first_part, chunk.num_parts);
  }
};

// `is_replayed` by domain. Cards are replayed everywhere.
[[nodiscard]] Schedule make_schedule(
    const Scenario& scenario,
    const Traffic& traffic,
    std::span<const RouteTable> routes,
    std::vector<bool> is_replayed
);

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

  // Returns what is busy longest: "links", "cards", "proxies" or "copies".
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
