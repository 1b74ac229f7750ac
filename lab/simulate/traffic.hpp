// SPDX-License-Identifier: Apache-2.0
// What a routing makes every rank send and receive: exact counts, all ranks, no times.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/build.hpp"
#include "simulate/scenario.hpp"

namespace weft::sim {

// Of one rank, in one dispatch. Combine moves the same rows the other way. A row is one token's
// vector; an arrival is a (token, rank) pair; all are of ranks other than this one unless it says
// so.
struct RankTraffic {
  int64_t num_rows = 0;  // of its output, padding included
  int64_t routes = 0;    // to its experts, from all ranks
  int64_t arrivals = 0;  // at this rank, from all ranks, its own tokens' included

  // Rows over the links of its domain; `forwarded` of link_out are tokens of other domains.
  int64_t link_out = 0;
  int64_t link_in = 0;
  int64_t forwarded = 0;
  // Rows over its network card.
  int64_t card_out = 0;
  int64_t card_in = 0;
  // The same if nothing were shared: a row for each remote rank, a row for each remote route.
  int64_t card_out_per_rank = 0;
  int64_t card_out_per_route = 0;

  int64_t messages_out = 0;  // over its card
  // Chunk signals of this rank that grow, and by how much: once for each row written to it.
  int64_t dispatch_signals = 0;
  int64_t dispatch_raises = 0;
  int64_t combine_signals = 0;
  int64_t combine_raises = 0;
};

struct Traffic {
  std::vector<RankTraffic> ranks;    // [num_ranks]
  std::vector<RankCounts> counts;    // [num_ranks] what each rank tells all others in a plan
  std::vector<int32_t> domain_rows;  // [num_ranks, num_domains] tokens that have a route there
  double domains_per_token = 0;      // distinct, its own included, of tokens with any route

  [[nodiscard]] int32_t arrivals(int source, int to) const {
    return counts[static_cast<size_t>(source)].arrivals[static_cast<size_t>(to)];
  }
};

// `routes` by rank, each as `scenario` says. Throws Error (kInvalidArgument) if an output has more
// rows than slots can number.
[[nodiscard]] Traffic count_traffic(
    const Scenario& scenario, int64_t message_rows, std::span<const RouteTable> routes
);

// Messages that `rows` of one chunk sequence take, each chunk of kChunkArrivals its own.
[[nodiscard]] int64_t count_messages(int64_t rows, int64_t message_rows);

}  // namespace weft::sim
