// SPDX-License-Identifier: Apache-2.0
// Spreads rows over replicas whose places are fixed, by the caller or the search of place.cpp, so
// that ranks are as even as these allow.
//
// One expert at a time, all rows of an expert are poured on its places like water: to the emptiest
// ranks, up to one level. What one expert's turn changes matters to the others', so all have turns
// until nothing changes; each turn lowers the sum of the squares of ranks' rows, so that ends.
#include <algorithm>
#include <numeric>

#include "plan/balance/balance.hpp"

namespace weft {
namespace {

class Pouring {
 public:
  explicit Pouring(Placement& placement)
      : placement_(placement), load_(placement.rows_of_ranks()) {}

  // Pours all rows of the expert of these places, ascending. Returns whether any moved.
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

  // Fills places to the lowest level that takes all rows, the first ones to one row more.
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

// [num_experts] the places of each that may take rows, ascending, and last the one that takes what
// is less than a block: its master, or where that is lost its last replica.
std::vector<std::vector<int32_t>> open_places(
    const Placement& placement, std::span<const int> lost
) {
  const PhysicalExperts& shape = placement.shape;
  std::vector<std::vector<int32_t>> places(static_cast<size_t>(shape.num_experts));
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    for (int replica = 0; !is_among(lost, rank) && replica < shape.replicas; ++replica) {
      const int place = shape.place_of(rank, replica);
      const int32_t expert = placement.expert[static_cast<size_t>(place)];
      if (expert >= 0) {
        places[static_cast<size_t>(expert)].push_back(place);
      }
    }
  }
  for (int expert = 0; expert < shape.num_experts; ++expert) {
    if (!is_among(lost, shape.owner_of(expert))) {
      places[static_cast<size_t>(expert)].push_back(shape.master_of(expert));
    }
  }
  return places;
}

void leave_whole_blocks(Placement& placement, std::span<const int32_t> places) {
  for (const int32_t place : places.first(places.size() - 1)) {
    const int64_t rest = placement.rows[static_cast<size_t>(place)] % placement.block_rows;
    placement.rows[static_cast<size_t>(place)] -= rest;
    placement.rows[static_cast<size_t>(places.back())] += rest;
  }
}

// Pours all rows of all experts; `places` as of open_places().
void pour(Placement& placement, const std::vector<std::vector<int32_t>>& places) {
  Pouring pouring(placement);
  bool has_changed = true;
  for (int turn = 0; turn < kMostTurns && has_changed; ++turn) {
    has_changed = false;
    for (size_t expert = 0; expert < places.size(); ++expert) {
      if (places[expert].size() > 1) {
        std::vector<int32_t> ascending = places[expert];
        std::ranges::sort(ascending);
        has_changed = pouring.pour(ascending) || has_changed;
      }
    }
  }
  for (size_t expert = 0; placement.block_rows > 1 && expert < places.size(); ++expert) {
    if (!places[expert].empty()) {
      leave_whole_blocks(placement, places[expert]);
    }
  }
}

}  // namespace

std::vector<int32_t> experts_without_copy(
    const PhysicalExperts& shape, std::span<const int32_t> replicas, std::span<const int> lost
) {
  std::vector<bool> has_copy(static_cast<size_t>(shape.num_experts));
  for (int expert = 0; expert < shape.num_experts; ++expert) {
    has_copy[static_cast<size_t>(expert)] = !is_among(lost, shape.owner_of(expert));
  }
  for (size_t i = 0; i < replicas.size(); ++i) {
    if (replicas[i] >= 0 && !is_among(lost, static_cast<int>(i) / shape.replicas)) {
      has_copy[static_cast<size_t>(replicas[i])] = true;
    }
  }
  std::vector<int32_t> without;
  for (int expert = 0; expert < shape.num_experts; ++expert) {
    if (!has_copy[static_cast<size_t>(expert)]) {
      without.push_back(expert);
    }
  }
  return without;
}

void pour_rows(Placement& placement, std::span<const int> lost) {
  pour(placement, open_places(placement, lost));
}

Placement spread_rows(
    std::span<const int64_t> rows,
    const PhysicalExperts& shape,
    std::span<const int32_t> replicas,
    int64_t block_rows,
    std::span<const int> lost
) {
  Placement placement = masters_of(rows, shape);
  for (size_t i = 0; i < replicas.size(); ++i) {
    const int at = static_cast<int>(i);
    const int place = shape.place_of(at / shape.replicas, at % shape.replicas);
    placement.expert[static_cast<size_t>(place)] = replicas[i];
  }
  const std::vector<std::vector<int32_t>> places = open_places(placement, lost);
  for (const int rank : lost) {
    for (int expert = rank * shape.num_local(); expert < (rank + 1) * shape.num_local(); ++expert) {
      if (const auto& open = places[static_cast<size_t>(expert)]; !open.empty()) {
        std::swap(
            placement.rows[static_cast<size_t>(shape.master_of(expert))],
            placement.rows[static_cast<size_t>(open.back())]
        );
      }
    }
  }
  placement.block_rows = block_rows;
  pour(placement, places);
  return placement;
}

}  // namespace weft
