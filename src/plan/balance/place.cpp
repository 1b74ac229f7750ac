// SPDX-License-Identifier: Apache-2.0
// The search for a placement: which limit on a rank's rows can be kept?
//
// Given a limit, the fullest rank gives rows of its largest expert to the emptiest rank that has a
// free place, as many as fit there, until no rank is above the limit (Attempt). The fullest rank
// may give more than it must, and then takes rows of others itself, so that its own places are used
// too. search.hpp says which limits are tried. Where the result is far from even, rows are spread
// once more over the places that were found (spread.cpp), as a limit that fails may be kept with
// the places of a higher one.
//
// All numbers are whole, and ties go to the lower rank or expert, so that a kernel finds the
// same (cuda/plan/balance/place.cuh): each of its warps tries one limit, with a lane for a rank or
// for an expert of the fullest rank.
#include <algorithm>
#include <numeric>
#include <optional>

#include "plan/balance/balance.hpp"
#include "plan/balance/search.hpp"

namespace weft {

std::vector<int64_t> Placement::rows_of_ranks() const {
  std::vector<int64_t> sums(static_cast<size_t>(shape.num_ranks), 0);
  for (size_t i = 0; i < rows.size(); ++i) {
    sums[static_cast<size_t>(shape.rank_of(static_cast<int>(i)))] += rows[i];
  }
  return sums;
}

int64_t Placement::busiest() const {
  return std::ranges::max(rows_of_ranks());
}

Placement masters_of(std::span<const int64_t> rows, const PhysicalExperts& shape) {
  Placement masters = {
      .shape = shape,
      .expert = std::vector<int32_t>(static_cast<size_t>(shape.count()), -1),
      .rows = std::vector<int64_t>(static_cast<size_t>(shape.count()), 0)};
  for (size_t e = 0; e < rows.size(); ++e) {
    const auto master = static_cast<size_t>(shape.master_of(static_cast<int>(e)));
    masters.expert[master] = static_cast<int32_t>(e);
    masters.rows[master] = rows[e];
  }
  return masters;
}

bool pays_off(const Placement& balanced, int64_t unbalanced, int64_t replica_rows) {
  const PhysicalExperts& shape = balanced.shape;
  const auto num_ranks = static_cast<size_t>(shape.num_ranks);
  std::vector<int64_t> sent(num_ranks, 0);
  std::vector<int64_t> taken(num_ranks, 0);
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    for (int replica = 0; replica < shape.replicas; ++replica) {
      const int32_t expert = balanced.expert[static_cast<size_t>(shape.place_of(rank, replica))];
      if (expert >= 0) {
        ++taken[static_cast<size_t>(rank)];
        ++sent[static_cast<size_t>(shape.owner_of(expert))];
      }
    }
  }
  const int64_t most = std::max(std::ranges::max(sent), std::ranges::max(taken));
  return replica_rows == 0 || unbalanced - balanced.busiest() > most * replica_rows;
}

namespace {

// Returns how many of `rows` fill whole blocks.
int64_t whole_blocks(const Placement& placement, int64_t rows) {
  return rows - rows % placement.block_rows;
}

// The fewest rows of a replica.
int64_t least_rows(const Placement& placement, const BalanceOptions& options) {
  return whole_blocks(placement, options.min_rows + placement.block_rows - 1);
}

// Spreads rows over the given places, if that is better and leaves all replicas enough.
void even_out(Placement& placement, const BalanceOptions& options) {
  Placement poured = placement;
  pour_rows(poured, options.lost);
  const PhysicalExperts& shape = poured.shape;
  const int64_t least = least_rows(placement, options);
  bool is_better = poured.busiest() < placement.busiest();
  for (int i = 0; is_better && i < shape.num_ranks * shape.replicas; ++i) {
    const auto place = static_cast<size_t>(shape.place_of(i / shape.replicas, i % shape.replicas));
    is_better = poured.expert[place] < 0 || poured.rows[place] >= least;
  }
  if (is_better) {
    placement = std::move(poured);
  }
}

// Tries to keep a limit.
class Attempt {
 public:
  Attempt(const Placement& masters, const BalanceOptions& options, int64_t limit)
      : placement_(masters),
        load_(masters.rows_of_ranks()),
        used_(load_.size(), 0),
        min_rows_(least_rows(masters, options)),
        limit_(limit) {
    for (const int rank : options.lost) {
      used_[static_cast<size_t>(rank)] = placement_.shape.replicas;
    }
  }

  // Returns the placement, if it keeps the limit.
  [[nodiscard]] std::optional<Placement> run() {
    while (true) {
      const auto fullest = std::ranges::max_element(load_);  // the first of several
      if (*fullest <= limit_) {
        return std::move(placement_);
      }
      const int expert = largest_expert(static_cast<int>(fullest - load_.begin()));
      const std::optional<int> to = emptiest_rank();
      if (!to || rows_of_master(expert) < min_rows_) {
        return std::nullopt;
      }
      replicate(expert, *to);
    }
  }

 private:
  [[nodiscard]] int64_t in_blocks(int64_t rows) const { return whole_blocks(placement_, rows); }
  [[nodiscard]] int64_t load(int rank) const { return load_[static_cast<size_t>(rank)]; }
  [[nodiscard]] int64_t& rows_of_master(int expert) {
    return placement_.rows[static_cast<size_t>(placement_.shape.master_of(expert))];
  }

  // Returns a rank's expert with most rows there.
  [[nodiscard]] int largest_expert(int rank) {
    const int num_local = placement_.shape.num_local();
    int largest = rank * num_local;
    for (int expert = largest + 1; expert < (rank + 1) * num_local; ++expert) {
      largest = rows_of_master(expert) > rows_of_master(largest) ? expert : largest;
    }
    return largest;
  }

  // Returns the emptiest of the ranks with a free place and room. No expert comes to a rank twice:
  // a rank that took some of its rows is full, or has all of them, but for less than a block.
  [[nodiscard]] std::optional<int> emptiest_rank() const {
    std::optional<int> emptiest;
    for (int rank = 0; rank < placement_.shape.num_ranks; ++rank) {
      if (used_[static_cast<size_t>(rank)] < placement_.shape.replicas &&
          limit_ - load(rank) >= min_rows_ && (!emptiest || load(rank) < load(*emptiest))) {
        emptiest = rank;
      }
    }
    return emptiest;
  }

  void replicate(int expert, int to) {
    const int64_t rows = in_blocks(std::min(limit_ - load(to), rows_of_master(expert)));
    const int replica = used_[static_cast<size_t>(to)]++;
    const auto place = static_cast<size_t>(placement_.shape.place_of(to, replica));
    placement_.expert[place] = expert;
    placement_.rows[place] = rows;
    rows_of_master(expert) -= rows;
    load_[static_cast<size_t>(placement_.shape.owner_of(expert))] -= rows;
    load_[static_cast<size_t>(to)] += rows;
  }

  Placement placement_;
  std::vector<int64_t> load_;  // [num_ranks]
  std::vector<int> used_;      // [num_ranks] places for replicas; all of a rank that is lost
  int64_t min_rows_;
  int64_t limit_;
};

}  // namespace

Placement place_replicas(
    const std::vector<int64_t>& rows, int num_ranks, const BalanceOptions& options
) {
  Placement masters =
      masters_of(rows, {num_ranks, static_cast<int>(rows.size()), options.replicas});
  masters.block_rows = options.block_rows;
  Placement best = masters;
  const int num_left = num_ranks - static_cast<int>(options.lost.size());
  LimitSearch search(std::reduce(rows.begin(), rows.end()), num_left, best.busiest());
  while (!search.is_over()) {
    std::optional<Placement> found;
    int probe = 0;
    while (!found && search.tries(probe)) {
      found = Attempt(masters, options, search.limit(probe)).run();
      probe += found ? 0 : 1;
    }
    if (found) {
      best = std::move(*found);
      search.keep(probe, best.busiest());
    } else {
      search.fail();
    }
  }
  if (!search.is_even(best.busiest())) {
    even_out(best, options);
  }
  return pays_off(best, masters.busiest(), options.replica_rows) ? best : masters;
}

}  // namespace weft
