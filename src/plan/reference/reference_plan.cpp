// SPDX-License-Identifier: Apache-2.0
#include "plan/reference_rows.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace weft::reference {
namespace {

int64_t round_up(int64_t rows, int64_t multiple) {
  while (rows % multiple != 0) {
    ++rows;
  }
  return rows;
}

struct Block {
  int64_t begin = 0;
  int64_t rows = 0;
  int64_t padded = 0;
};

// Gives every route to `rank` its slot and fills what the receiver knows.
class Receiver {
 public:
  Receiver(const Problem& problem, std::vector<Route>& routes, PlanData& plan)
      : problem_(problem), plan_(plan) {
    for (Route& route : routes) {
      if (route.target == plan.shape.rank) {
        mine_.push_back(&route);
      }
    }
    rows_ = rows_of_experts(problem, routes);
  }

  void number_rows() {
    if (problem_.is_rank_major()) {
      number_arrivals();
    } else {
      number_experts();
    }
    plan_.rows_per_expert.assign(static_cast<size_t>(problem_.experts_per_rank()), 0);
    for (const Route* route : mine_) {
      const bool kept = route->slot >= 0;
      plan_.overflow |= !kept;
      plan_.rows_per_expert[static_cast<size_t>(route->expert % problem_.experts_per_rank())] +=
          kept ? 1 : 0;
    }
    finish_blocks();
  }

 private:
  [[nodiscard]] int64_t budget() const {
    return problem_.budgets[static_cast<size_t>(plan_.shape.rank)];
  }

  void number_arrivals() {
    std::set<std::pair<int, int32_t>> arrivals;  // by source rank, then token
    for (const Route* route : mine_) {
      arrivals.emplace(route->source, route->token);
    }
    plan_.required_rows = static_cast<int64_t>(arrivals.size());
    plan_.num_rows = budget() >= 0 ? budget() : plan_.required_rows;
    for (Route* route : mine_) {
      const auto place = arrivals.find({route->source, route->token});
      const int64_t row = std::distance(arrivals.begin(), place);
      route->slot = row < plan_.num_rows ? row : -1;
    }
  }

  void number_experts() {
    const int64_t stride = resolved_stride(problem_, rows_);
    const int64_t pad = problem_.options.pad_multiple;
    int64_t begin = 0;
    for (int local = 0; local < problem_.experts_per_rank(); ++local) {
      const int expert = plan_.shape.rank * problem_.experts_per_rank() + local;
      const int64_t rows = rows_[static_cast<size_t>(expert)];
      blocks_.push_back({begin, rows, round_up(rows, pad)});
      begin += problem_.is_strided() ? stride : round_up(rows, pad);
    }
    plan_.required_rows = begin;
    if (problem_.is_strided()) {
      int64_t largest = 0;
      for (const int64_t rows : rows_) {
        largest = std::max(largest, round_up(rows, pad));
      }
      plan_.required_rows = largest * problem_.experts_per_rank();
    }
    plan_.num_rows = budget() >= 0 ? budget() : begin;
    place_in_blocks(stride);
  }

  void place_in_blocks(int64_t stride) {
    std::sort(mine_.begin(), mine_.end(), [](const Route* a, const Route* b) {
      return std::tie(a->expert, a->source, a->token, a->k) <
             std::tie(b->expert, b->source, b->token, b->k);
    });
    std::map<int, int64_t> used;  // rows of each expert so far
    for (Route* route : mine_) {
      const int64_t place = used[route->expert]++;
      const int64_t begin =
          blocks_[static_cast<size_t>(route->expert % problem_.experts_per_rank())].begin;
      const bool fits =
          begin + place < plan_.num_rows && (!problem_.is_strided() || place < stride);
      route->slot = fits ? begin + place : -1;
    }
  }

  void finish_blocks() {
    const auto num_local = static_cast<size_t>(problem_.experts_per_rank());
    plan_.padded_rows_per_expert = plan_.rows_per_expert;
    plan_.expert_begin.assign(num_local, 0);
    if (problem_.is_rank_major()) {
      return;
    }
    const int64_t stride = resolved_stride(problem_, rows_);
    for (size_t e = 0; e < num_local; ++e) {
      const Block& block = blocks_[e];
      plan_.expert_begin[e] = std::min(block.begin, plan_.num_rows);
      int64_t end = std::min(block.begin + block.padded, plan_.num_rows);
      if (problem_.is_strided()) {
        end = std::min(end, block.begin + stride);
      }
      plan_.padded_rows_per_expert[e] = std::max<int64_t>(0, end - block.begin);
      const int64_t kept_end = plan_.expert_begin[e] + plan_.rows_per_expert[e];
      if (kept_end < end) {
        plan_.padding.emplace_back(kept_end, end);
      }
    }
  }

  const Problem& problem_;
  PlanData& plan_;
  std::vector<Route*> mine_;
  std::vector<int64_t> rows_;  // [num_experts]
  std::vector<Block> blocks_;
};

}  // namespace

std::vector<Route> list_routes(const Problem& problem) {
  std::vector<Route> all;
  for (int source = 0; source < problem.num_ranks(); ++source) {
    const RouteTable& table = problem.tables[static_cast<size_t>(source)];
    for (size_t i = 0; i < table.expert.size(); ++i) {
      if (table.expert[i] == -1) {
        continue;
      }
      Route route;
      route.source = source;
      route.token = static_cast<int32_t>(i / static_cast<size_t>(table.topk));
      route.k = static_cast<int32_t>(i % static_cast<size_t>(table.topk));
      route.expert = table.expert[i];
      route.weight = table.weight.empty() ? 0 : table.weight[i];
      route.target = route.expert / problem.experts_per_rank();
      all.push_back(route);
    }
  }
  return all;
}

std::vector<int64_t> rows_of_experts(const Problem& problem, const std::vector<Route>& routes) {
  std::vector<int64_t> rows(static_cast<size_t>(problem.num_experts), 0);
  for (const Route& route : routes) {
    ++rows[static_cast<size_t>(route.expert)];
  }
  return rows;
}

int64_t resolved_stride(const Problem& problem, const std::vector<int64_t>& rows) {
  if (!problem.is_strided() || problem.options.expert_stride != 0) {
    return problem.options.expert_stride;
  }
  int64_t stride = 0;
  for (const int64_t count : rows) {
    stride = std::max(stride, round_up(count, problem.options.pad_multiple));
  }
  return stride;
}

void number_rows(const Problem& problem, std::vector<Route>& routes, PlanData& plan) {
  Receiver(problem, routes, plan).number_rows();
}

}  // namespace weft::reference
