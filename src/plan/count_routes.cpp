// SPDX-License-Identifier: Apache-2.0
#include "plan/build.hpp"
#include "plan/slots.hpp"

namespace weft {

void add_counts(const RouteTable& routes, int64_t begin, int64_t end, RankCounts& counts) {
  const auto num_ranks = counts.arrivals.size();
  const int per_rank = static_cast<int>(counts.routes.size() / num_ranks);
  std::vector<int64_t> last_token(num_ranks, -1);  // seen going to each rank
  const int32_t* expert = routes.expert.data() + begin * routes.topk;
  for (int64_t token = begin; token < end; ++token) {
    for (int k = 0; k < routes.topk; ++k, ++expert) {
      if (*expert < 0) {
        continue;
      }
      ++counts.routes[static_cast<size_t>(*expert)];
      const auto target = static_cast<size_t>(owner_rank(*expert, per_rank));
      counts.arrivals[target] += last_token[target] != token ? 1 : 0;
      last_token[target] = token;
    }
  }
}

RankCounts count_routes(
    const RouteTable& routes, int num_experts, int num_ranks, const PlanOptions& options
) {
  RankCounts counts;
  counts.num_tokens = routes.num_tokens;
  counts.row_budget = options.row_budget.value_or(-1);
  counts.routes.resize(static_cast<size_t>(num_experts));
  counts.arrivals.resize(static_cast<size_t>(num_ranks));
  add_counts(routes, 0, routes.num_tokens, counts);
  return counts;
}

}  // namespace weft
