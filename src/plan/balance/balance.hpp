// SPDX-License-Identifier: Apache-2.0
// Chooses the experts that get copies on other ranks for one routing, so that all ranks have about
// as many rows, and the routes that go to the copies. A pure function of the counts that every rank
// has: all ranks compute the same. routing.hpp makes a plan call do it.
//
// The weights of an expert lie in places: expert e always on rank e / (experts / ranks), its
// master, and perhaps in replicas on other ranks. A *physical expert* is one such place; a rank has
// those of its masters, then those for replicas, which may stay empty.
//
//   counts -> place_replicas (place.cpp) -> Placement -> share_out (quotas.cpp) -> Balance
//   Balance and one rank's routes -> assign_routes (quotas.cpp) -> a physical expert for each route
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/hd.hpp"

namespace weft {

inline constexpr int64_t kMostBlockRows = 1024;
inline constexpr int64_t kMostReplicaRows = INT32_MAX;
// Most turns of each expert when its rows are spread on its places (spread.cpp); ranks that need
// more are nearly even by then.
inline constexpr int kMostTurns = 64;

struct BalanceOptions {
  int replicas = 0;                 // most on each rank, 0 to kMostReplicas
  int64_t min_rows = 1;             // a replica with fewer rows is not worth its weights
  std::vector<int> domain_of = {};  // [num_ranks]; empty: all ranks are in one domain
  int64_t block_rows = 1;           // see Placement; above 1 domains do not count
  int64_t replica_rows = 0;         // what a replica's weights cost, see pays_off
  std::vector<int> lost = {};  // ranks, ascending, that take no rows; no rows are of their experts
};

struct PhysicalExperts {
  int num_ranks = 0;
  int num_experts = 0;
  int replicas = 0;  // places for them on each rank

  [[nodiscard]] WEFT_HD int num_local() const { return num_experts / num_ranks; }
  [[nodiscard]] WEFT_HD int per_rank() const { return num_local() + replicas; }
  [[nodiscard]] WEFT_HD int count() const { return num_ranks * per_rank(); }
  [[nodiscard]] WEFT_HD int rank_of(int physical) const { return physical / per_rank(); }
  [[nodiscard]] WEFT_HD int owner_of(int expert) const { return expert / num_local(); }
  [[nodiscard]] WEFT_HD int master_of(int expert) const {
    return owner_of(expert) * per_rank() + expert % num_local();
  }
  [[nodiscard]] WEFT_HD int place_of(int rank, int replica) const {
    return rank * per_rank() + num_local() + replica;
  }
};

// Returns whether `rank` is among `ranks`, which must ascend.
[[nodiscard]] inline bool is_among(std::span<const int> ranks, int rank) {
  return std::binary_search(ranks.begin(), ranks.end(), rank);
}

struct Placement {
  PhysicalExperts shape;
  std::vector<int32_t> expert;  // [shape.count()] that lies there, -1: none
  std::vector<int64_t> rows;    // [shape.count()] of all sources
  // Above 1: an expert's rows have an order, by source, then token. The replicas by ascending
  // place, then the master take intervals of that, one after the other, and a replica whole blocks
  // of so many rows.
  int64_t block_rows = 1;

  [[nodiscard]] std::vector<int64_t> rows_of_ranks() const;
  [[nodiscard]] int64_t busiest() const;  // rows of the rank that has most
};

struct Balance {
  Placement placement;
  std::vector<int64_t> quotas;  // [num_ranks, shape.count()] of placement.rows, by source rank

  [[nodiscard]] std::span<const int64_t> quotas_of(int source) const {
    const auto count = static_cast<size_t>(placement.shape.count());
    return std::span(quotas).subspan(static_cast<size_t>(source) * count, count);
  }
  // [num_ranks, replicas] the expert of each replica, -1: none.
  [[nodiscard]] std::vector<int32_t> replicas() const;
};

// Balances `counts`, [num_ranks, num_experts] routes from a source rank to an expert. A replica has
// at least min_rows. An expert's place gets rows of its own rank first, then of its domain. Throws
// Error (kInvalidArgument) for sizes and options that do not fit.
[[nodiscard]] Balance plan_balance(
    std::span<const int32_t> counts, int num_ranks, const BalanceOptions& options
);

// Steps of plan_balance(). `rows`: [num_experts] of all sources. No replicas if they do not pay.
[[nodiscard]] Placement place_replicas(
    const std::vector<int64_t>& rows, int num_ranks, const BalanceOptions& options
);
[[nodiscard]] Balance share_out(
    std::span<const int32_t> counts, Placement placement, std::span<const int> domain_of
);

// Returns whether replicas spare the busiest rank, which has `unbalanced` rows without them, more
// than the weights cost that some rank sends or gets: replica_rows for each replica, or nothing.
[[nodiscard]] bool pays_off(const Placement& balanced, int64_t unbalanced, int64_t replica_rows);

// Puts every row at its expert's master. `rows`: [shape.num_experts].
[[nodiscard]] Placement masters_of(std::span<const int64_t> rows, const PhysicalExperts& shape);

// Stands for place_replicas where `replicas`, [num_ranks, shape.replicas] as Balance::replicas, are
// fixed, of which some may get no rows (spread.cpp). Ranks that are `lost` take none: the last
// replica of an expert stands in for a master there. No rows are of experts without copies
// elsewhere.
[[nodiscard]] Placement spread_rows(
    std::span<const int64_t> rows,
    const PhysicalExperts& shape,
    std::span<const int32_t> replicas,
    int64_t block_rows = 1,
    std::span<const int> lost = {}
);

// Moves rows between the places of each expert, so that ranks become more even; replicas keep whole
// blocks. Ranks that are `lost` take none.
void pour_rows(Placement& placement, std::span<const int> lost = {});

// Returns the experts that lie only on lost ranks, ascending. `replicas` as for spread_rows.
[[nodiscard]] std::vector<int32_t> experts_without_copy(
    const PhysicalExperts& shape, std::span<const int32_t> replicas, std::span<const int> lost
);

// Returns the physical expert of each route of `source`, by token: an expert's first routes go to
// its first place until the quota is used up (see Placement::block_rows for the order of places).
// -1 stays -1. Throws Error (kInvalidArgument) for routes that were not counted.
[[nodiscard]] std::vector<int32_t> assign_routes(
    const Balance& balance, int source, std::span<const int32_t> experts
);

}  // namespace weft
