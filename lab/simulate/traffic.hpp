// SPDX-License-Identifier: Apache-2.0
// Scenario that is simulated, ranks in domains (nodes) of equal size, and the rows that a routing
// makes every rank send. simulate.cpp counts them first; schedule.cpp and memory.cpp go on from the
// counts.
//
// Purpose of this folder: replays an exchange that this machine cannot hold. May include: plan,
// core, and of the executors what says how much memory they take.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "plan/build.hpp"

namespace weft::sim {

inline constexpr int kMostRanks = 1 << 14;

struct Scenario {
  int num_ranks = 16;
  int ranks_per_domain = 8;  // divides num_ranks
  int num_experts = 256;     // divisible by num_ranks
  int topk = 8;
  int64_t max_tokens = 4096;
  int64_t row_bytes = 14336;
  int64_t pad_multiple = 1;  // of an expert's rows
  // Each row goes to every remote rank by itself, instead of once to a domain.
  bool is_flat = false;

  [[nodiscard]] int num_domains() const { return num_ranks / ranks_per_domain; }
  [[nodiscard]] int domain_of(int rank) const { return rank / ranks_per_domain; }
  [[nodiscard]] int owner_of(int expert) const { return expert / (num_experts / num_ranks); }
  // The rank of `domain` that takes in what `source` sends there.
  [[nodiscard]] int forwarder(int source, int domain) const {
    return domain * ranks_per_domain + source % ranks_per_domain;
  }
};

// Rows and messages that a routing makes one rank send and receive in one dispatch: exact counts,
// no times. Combine moves the same rows the other way. A row is one token's vector; an arrival is a
// (token, rank) pair; all are of ranks other than this one unless it says so.
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
  // Rows sent over its card if nothing were shared: a row for each remote rank, a row for each
  // remote route.
  int64_t card_out_per_rank = 0;
  int64_t card_out_per_route = 0;

  int64_t messages_out = 0;  // over its card
  // Chunk signals of this rank that grow, and by how much: once for each row written to it.
  int64_t dispatch_signals = 0;
  int64_t dispatch_raises = 0;
  int64_t combine_signals = 0;
  int64_t combine_raises = 0;
};
struct TrafficField {
  std::string_view name;
  int64_t RankTraffic::*value;
};
// All of them.
[[nodiscard]] std::span<const TrafficField> traffic_fields();

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
