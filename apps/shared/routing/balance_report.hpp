// SPDX-License-Identifier: Apache-2.0
// Effect that replicas of experts would have on a routing: how even the ranks become, which experts
// are copied where, and how many bytes of weights that moves.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "plan/balance/balance.hpp"
#include "routing/report.hpp"

namespace weft::program {

// With some number of replicas a rank.
struct BalanceOutcome {
  int replicas = 0;
  int64_t busiest = 0;  // rows of the busiest rank
  double of_mean = 1;
  int64_t copies = 0;
  int64_t moved_bytes = 0;  // of weights
};

struct BalanceCopy {
  int expert = 0;
  int from = 0;  // rank of the master
  int to = 0;
  int64_t rows = 0;
};

struct BalanceReport {
  int replicas = 0;
  std::vector<BalanceOutcome> outcomes;  // for 0, 1, 2, 4 replicas and as many as were asked for
  std::vector<BalanceCopy> copies;       // with as many as were asked for
};

[[nodiscard]] BalanceReport make_balance_report(
    const PlanReport& plans, const BalanceOptions& options, int64_t expert_bytes
);

[[nodiscard]] std::string balance_text(const BalanceReport& report);  // two tables
[[nodiscard]] nlohmann::ordered_json balance_json(const BalanceReport& report);

}  // namespace weft::program
