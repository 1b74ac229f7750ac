// SPDX-License-Identifier: Apache-2.0
#include "balance_oracle.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

namespace weft {
namespace {

// Finds whether moving rows between places of one expert can bring all ranks down to a limit: the
// augmenting paths of Ford and Fulkerson, shortest first, each from a rank above the limit to one
// below it.
class Flow {
 public:
  Flow(const Placement& placement, int64_t limit)
      : placement_(placement), load_(placement.rows_of_ranks()), limit_(limit) {}

  bool keeps_limit() {
    for (size_t rank = 0; rank < load_.size(); ++rank) {
      while (load_[rank] > limit_) {
        if (!relieve(rank)) {
          return false;
        }
      }
    }
    return true;
  }

 private:
  // How a rank was reached: rows can go from one place of an expert to another.
  struct Step {
    int from = -1;
    int to = -1;
  };

  bool relieve(size_t start) {
    std::vector<Step> reached(load_.size());
    std::vector<size_t> ranks = {start};
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (load_[ranks[i]] < limit_) {
        push_along(reached, start, ranks[i]);
        return true;
      }
      for (const Step& step : steps_from(ranks[i])) {
        const auto rank = static_cast<size_t>(placement_.shape.rank_of(step.to));
        if (rank != start && reached[rank].to < 0) {
          reached[rank] = step;
          ranks.push_back(rank);
        }
      }
    }
    return false;
  }

  [[nodiscard]] std::vector<Step> steps_from(size_t rank) const {
    std::vector<Step> steps;
    for (int from = 0; from < placement_.shape.count(); ++from) {
      const auto f = static_cast<size_t>(from);
      if (placement_.shape.rank_of(from) != static_cast<int>(rank) || placement_.rows[f] == 0) {
        continue;
      }
      for (int to = 0; to < placement_.shape.count(); ++to) {
        if (to != from && placement_.expert[static_cast<size_t>(to)] == placement_.expert[f]) {
          steps.push_back({from, to});
        }
      }
    }
    return steps;
  }

  void push_along(const std::vector<Step>& reached, size_t start, size_t end) {
    std::vector<Step> path;
    for (size_t rank = end; rank != start;) {
      path.push_back(reached[rank]);
      rank = static_cast<size_t>(placement_.shape.rank_of(reached[rank].from));
    }
    int64_t rows = std::min(load_[start] - limit_, limit_ - load_[end]);
    for (const Step& step : path) {
      rows = std::min(rows, placement_.rows[static_cast<size_t>(step.from)]);
    }
    for (const Step& step : path) {
      placement_.rows[static_cast<size_t>(step.from)] -= rows;
      placement_.rows[static_cast<size_t>(step.to)] += rows;
    }
    load_[start] -= rows;
    load_[end] += rows;
  }

  Placement placement_;
  std::vector<int64_t> load_;  // [num_ranks]
  int64_t limit_;
};

}  // namespace

int64_t least_busiest(const Placement& placement) {
  const std::vector<int64_t> load = placement.rows_of_ranks();
  const auto num_ranks = static_cast<int64_t>(load.size());
  int64_t low = (std::reduce(load.begin(), load.end()) + num_ranks - 1) / num_ranks;
  int64_t high = placement.busiest();  // can be kept: that is how it is
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (Flow(placement, middle).keeps_limit()) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace weft
