// SPDX-License-Identifier: Apache-2.0
// Quotas: how many rows each source sends to each place of an expert, and which routes these are.
//
// An expert's places take what their own rank has, then what their domain has, then the rest, in
// ascending order of places and sources. A kernel does each of the three with prefix sums: source
// and place get the rows that both intervals have in common, as laid end to end in their group.
// Only the third step is left if places take blocks: an interval has its sources by rank.
#include <algorithm>
#include <numeric>

#include "core/check.hpp"
#include "plan/balance/balance.hpp"
#include "weft/plan.hpp"

namespace weft {
namespace {

// [num_experts] the physical experts of each, in the order in which they are filled: ascending, or,
// where replicas take blocks, the master last.
std::vector<std::vector<int32_t>> places_of_experts(const Placement& placement) {
  std::vector<std::vector<int32_t>> places(static_cast<size_t>(placement.shape.num_experts));
  for (size_t i = 0; i < placement.expert.size(); ++i) {
    if (placement.expert[i] >= 0) {
      places[static_cast<size_t>(placement.expert[i])].push_back(static_cast<int32_t>(i));
    }
  }
  for (size_t expert = 0; placement.block_rows > 1 && expert < places.size(); ++expert) {
    const int32_t master = placement.shape.master_of(static_cast<int>(expert));
    std::stable_partition(places[expert].begin(), places[expert].end(), [&](int32_t place) {
      return place != master;
    });
  }
  return places;
}

void check_arguments(
    std::span<const int32_t> counts, int num_ranks, const BalanceOptions& options
) {
  const auto check = [](bool is_good, const char* name, int64_t value, const std::string& bounds) {
    WEFT_CHECK_ARG(Context{}, is_good, "plan_balance: {} is {} ({})", name, value, bounds);
  };
  check(num_ranks >= 1, "num_ranks", num_ranks, "at least 1");
  const auto ranks = static_cast<size_t>(num_ranks);
  check(
      !counts.empty() && counts.size() % (ranks * ranks) == 0,
      "the number of counts",
      static_cast<int64_t>(counts.size()),
      fmt::format("{} ranks times experts that they can share", num_ranks)
  );
  const int32_t least = std::ranges::min(counts);
  check(least >= 0, "a count", least, "at least 0");
  check(
      options.replicas >= 0 && options.replicas <= kMostReplicas,
      "replicas",
      options.replicas,
      fmt::format("0 to {}", kMostReplicas)
  );
  check(options.min_rows >= 1, "min_rows", options.min_rows, "at least 1");
  check(
      options.block_rows >= 1 && options.block_rows <= kMostBlockRows,
      "block_rows",
      options.block_rows,
      fmt::format("1 to {}", kMostBlockRows)
  );
  check(
      options.replica_rows >= 0 && options.replica_rows <= kMostReplicaRows,
      "replica_rows",
      options.replica_rows,
      fmt::format("0 to {}", kMostReplicaRows)
  );
  check(
      options.domain_of.empty() || options.domain_of.size() == ranks,
      "the size of domain_of",
      static_cast<int64_t>(options.domain_of.size()),
      fmt::format("0 or the number of ranks, {}", num_ranks)
  );
}

}  // namespace

std::vector<int32_t> Balance::replicas() const {
  const PhysicalExperts& shape = placement.shape;
  std::vector<int32_t> experts;
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    const auto first = placement.expert.begin() + shape.place_of(rank, 0);
    experts.insert(experts.end(), first, first + shape.replicas);
  }
  return experts;
}

Balance share_out(
    std::span<const int32_t> counts, Placement placement, std::span<const int> domain_of
) {
  const PhysicalExperts shape = placement.shape;
  const auto num_ranks = static_cast<size_t>(shape.num_ranks);
  const auto num_places = static_cast<size_t>(shape.count());
  std::vector<int> own(num_ranks);
  std::iota(own.begin(), own.end(), 0);
  const std::vector<int> all(num_ranks, 0);
  const std::span<const int> by_distance[] = {own, domain_of.empty() ? all : domain_of, all};
  const std::span groups = std::span(by_distance).subspan(placement.block_rows > 1 ? 2 : 0);

  Balance balance = {std::move(placement), std::vector<int64_t>(num_ranks * num_places, 0)};
  std::vector<int64_t> left(counts.begin(), counts.end());  // to be sent
  std::vector<int64_t> room = balance.placement.rows;       // of each place
  const auto places = places_of_experts(balance.placement);
  for (const std::span<const int> group_of : groups) {
    for (size_t expert = 0; expert < places.size(); ++expert) {
      for (const int32_t place : places[expert]) {
        const auto p = static_cast<size_t>(place);
        const int group = group_of[static_cast<size_t>(shape.rank_of(place))];
        for (size_t source = 0; source < num_ranks; ++source) {
          int64_t& rest = left[source * places.size() + expert];
          const int64_t taken = group_of[source] == group ? std::min(rest, room[p]) : 0;
          balance.quotas[source * num_places + p] += taken;
          rest -= taken;
          room[p] -= taken;
        }
      }
    }
  }
  return balance;
}

Balance plan_balance(
    std::span<const int32_t> counts, int num_ranks, const BalanceOptions& options
) {
  check_arguments(counts, num_ranks, options);
  const size_t num_experts = counts.size() / static_cast<size_t>(num_ranks);
  std::vector<int64_t> rows(num_experts, 0);
  for (size_t i = 0; i < counts.size(); ++i) {
    rows[i % num_experts] += counts[i];
  }
  return share_out(counts, place_replicas(rows, num_ranks, options), options.domain_of);
}

std::vector<int32_t> assign_routes(
    const Balance& balance, int source, std::span<const int32_t> experts
) {
  const auto places = places_of_experts(balance.placement);
  const std::span<const int64_t> quotas = balance.quotas_of(source);
  std::vector<int64_t> left(quotas.begin(), quotas.end());
  std::vector<size_t> next(places.size(), 0);  // of each expert, the place whose turn it is
  std::vector<int32_t> assigned;
  assigned.reserve(experts.size());
  for (const int32_t expert : experts) {
    if (expert < 0) {
      assigned.push_back(-1);
      continue;
    }
    WEFT_CHECK_ARG(
        Context{},
        static_cast<size_t>(expert) < places.size(),
        "assign_routes: rank {} has a route to expert {} (of {})",
        source,
        expert,
        places.size()
    );
    const std::vector<int32_t>& mine = places[static_cast<size_t>(expert)];
    size_t& turn = next[static_cast<size_t>(expert)];
    while (turn < mine.size() && left[static_cast<size_t>(mine[turn])] == 0) {
      ++turn;
    }
    WEFT_CHECK_ARG(
        Context{},
        turn < mine.size(),
        "assign_routes: rank {} has more routes to expert {} than were counted",
        source,
        expert
    );
    --left[static_cast<size_t>(mine[turn])];
    assigned.push_back(mine[turn]);
  }
  return assigned;
}

}  // namespace weft
