// SPDX-License-Identifier: Apache-2.0
// Rows for replicas that lie where somebody else decided, so that ranks are as even as that lets
// them be.
//
// One expert at a time, all rows of an expert are poured on its places like water: to the emptiest
// ranks, up to one level. What one expert's turn changes matters to the others', so all have turns
// until nothing changes; each turn lowers the sum of the squares of ranks' rows, so that ends.
#include <algorithm>
#include <numeric>

#include "plan/balance/balance.hpp"

namespace weft {
namespace {

constexpr int kMostTurns = 64;  // of an expert; whoever needs more is nearly even by then

class Pouring {
 public:
  explicit Pouring(Placement& placement)
      : placement_(placement), load_(placement.rows_of_ranks()) {}

  // All rows of the expert with these places, ascending. True if it changed anything.
  bool pour(const std::vector<int32_t>& places) {
    int64_t rows = 0;
    std::vector<int64_t> before;
    for (const int32_t place : places) {
      int64_t& here = placement_.rows[static_cast<size_t>(place)];
      before.push_back(here);
      load_of(place) -= here;
      rows += here;
      here = 0;
    }
    fill(places, rows);
    bool has_changed = false;
    for (size_t i = 0; i < places.size(); ++i) {
      const int64_t here = placement_.rows[static_cast<size_t>(places[i])];
      load_of(places[i]) += here;
      has_changed = has_changed || here != before[i];
    }
    return has_changed;
  }

 private:
  int64_t& load_of(int32_t place) {
    return load_[static_cast<size_t>(placement_.shape.rank_of(place))];
  }

  // The lowest level that takes all rows, and one more for the first places of those below it.
  void fill(std::vector<int32_t> places, int64_t rows) {
    std::ranges::stable_sort(places, [&](int32_t a, int32_t b) { return load_of(a) < load_of(b); });
    int64_t sum = rows;
    size_t used = 0;
    while (used < places.size() &&
           (used == 0 || load_of(places[used]) * static_cast<int64_t>(used) < sum)) {
      sum += load_of(places[used++]);
    }
    const int64_t level = sum / static_cast<int64_t>(used);
    int64_t more = sum % static_cast<int64_t>(used);
    for (size_t i = 0; i < used; ++i) {
      placement_.rows[static_cast<size_t>(places[i])] =
          level + (more-- > 0 ? 1 : 0) - load_of(places[i]);
    }
  }

  Placement& placement_;
  std::vector<int64_t> load_;  // [num_ranks]
};

// What is less than a block goes back to the master.
void leave_whole_blocks(Placement& placement) {
  const PhysicalExperts& shape = placement.shape;
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    for (int replica = 0; replica < shape.replicas; ++replica) {
      const auto place = static_cast<size_t>(shape.place_of(rank, replica));
      const int64_t rest = placement.rows[place] % placement.block_rows;
      if (rest > 0) {
        const auto master = static_cast<size_t>(shape.master_of(placement.expert[place]));
        placement.rows[place] -= rest;
        placement.rows[master] += rest;
      }
    }
  }
}

}  // namespace

Placement spread_rows(
    std::span<const int64_t> rows,
    const PhysicalExperts& shape,
    std::span<const int32_t> replicas,
    int64_t block_rows
) {
  Placement placement = masters_of(rows, shape);
  std::vector<std::vector<int32_t>> places(rows.size());
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    for (int replica = 0; replica < shape.replicas; ++replica) {
      const int32_t expert = replicas[static_cast<size_t>(rank * shape.replicas + replica)];
      const int32_t place = shape.place_of(rank, replica);
      placement.expert[static_cast<size_t>(place)] = expert;
      if (expert >= 0) {
        places[static_cast<size_t>(expert)].push_back(place);
      }
    }
  }
  Pouring pouring(placement);
  bool has_changed = true;
  for (int turn = 0; turn < kMostTurns && has_changed; ++turn) {
    has_changed = false;
    for (size_t expert = 0; expert < places.size(); ++expert) {
      if (!places[expert].empty()) {
        std::vector<int32_t> all = places[expert];
        all.push_back(shape.master_of(static_cast<int>(expert)));
        std::ranges::sort(all);
        has_changed = pouring.pour(all) || has_changed;
      }
    }
  }
  placement.block_rows = block_rows;
  leave_whole_blocks(placement);
  return placement;
}

}  // namespace weft
