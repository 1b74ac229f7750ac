// SPDX-License-Identifier: Apache-2.0
#include "plan/build.hpp"
#include "plan/slots.hpp"

namespace weft {

RankCounts count_routes(
    const RouteTable& routes, int num_experts, int num_ranks, const PlanOptions& options
) {
  RankCounts counts;
  counts.num_tokens = routes.num_tokens;
  counts.row_budget = options.row_budget.value_or(-1);
  counts.routes.resize(static_cast<size_t>(num_experts));
  counts.arrivals.resize(static_cast<size_t>(num_ranks));

  const int per_rank = num_experts / num_ranks;
  std::vector<int64_t> last_token(static_cast<size_t>(num_ranks), -1);  // seen going to each rank
  const int32_t* expert = routes.expert.data();
  for (int64_t token = 0; token < routes.num_tokens; ++token) {
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
  return counts;
}

}  // namespace weft
