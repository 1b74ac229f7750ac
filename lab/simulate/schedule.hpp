// SPDX-License-Identifier: Apache-2.0
// The transfers of one dispatch in the order in which each rank begins them: chunks of rows to a
// rank, and what each chunk brings to whom. Combine runs through the same chunks backwards. Made
// from the counts of traffic.hpp, replayed by replay.cpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "simulate/traffic.hpp"

namespace weft::sim {

// What a chunk brings to one rank of the target's domain.
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

}  // namespace weft::sim
