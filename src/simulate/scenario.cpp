// SPDX-License-Identifier: Apache-2.0
#include "simulate/scenario.hpp"

#include "core/check.hpp"
#include "weft/routing.hpp"

namespace weft::sim {

void check_scenario(const Scenario& scenario) {
  const Context nobody;
  WEFT_CHECK_ARG(
      nobody,
      scenario.num_ranks >= 1 && scenario.num_ranks <= kMostRanks,
      "simulate: num_ranks = {} (1 to {})",
      scenario.num_ranks,
      kMostRanks
  );
  WEFT_CHECK_ARG(
      nobody,
      scenario.ranks_per_domain >= 1 && scenario.num_ranks % scenario.ranks_per_domain == 0,
      "simulate: num_ranks = {} is not a multiple of ranks_per_domain = {}",
      scenario.num_ranks,
      scenario.ranks_per_domain
  );
  WEFT_CHECK_ARG(
      nobody,
      scenario.num_experts >= scenario.num_ranks && scenario.num_experts % scenario.num_ranks == 0,
      "simulate: num_experts = {} is not a positive multiple of num_ranks = {}",
      scenario.num_experts,
      scenario.num_ranks
  );
  WEFT_CHECK_ARG(
      nobody,
      scenario.topk >= 1 && scenario.topk <= kMaxTopk,
      "simulate: topk = {} (1 to {})",
      scenario.topk,
      kMaxTopk
  );
  WEFT_CHECK_ARG(
      nobody,
      scenario.max_tokens >= 0 && scenario.row_bytes >= 16 && scenario.row_bytes % 16 == 0 &&
          scenario.pad_multiple >= 1,
      "simulate: max_tokens = {} (at least 0), row_bytes = {} (a multiple of 16), pad_multiple = "
      "{} "
      "(at least 1)",
      scenario.max_tokens,
      scenario.row_bytes,
      scenario.pad_multiple
  );
}

}  // namespace weft::sim
