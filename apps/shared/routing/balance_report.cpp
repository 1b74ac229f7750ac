// SPDX-License-Identifier: Apache-2.0
#include "routing/balance_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "report/table.hpp"

namespace weft::program {
namespace {

std::vector<BalanceCopy> copies_of(const Placement& placement) {
  const PhysicalExperts& shape = placement.shape;
  std::vector<BalanceCopy> copies;
  for (int place = 0; place < shape.count(); ++place) {
    const int expert = placement.expert[static_cast<size_t>(place)];
    if (expert >= 0 && shape.master_of(expert) != place) {
      const int64_t rows = placement.rows[static_cast<size_t>(place)];
      copies.push_back({expert, shape.owner_of(expert), shape.rank_of(place), rows});
    }
  }
  std::ranges::stable_sort(copies, {}, &BalanceCopy::expert);
  return copies;
}

}  // namespace

BalanceReport make_balance_report(
    const PlanReport& plans, const BalanceOptions& options, int64_t expert_bytes
) {
  const auto routes = plans.plans.front().global_routes_per_expert();
  BalanceReport report;
  report.replicas = options.replicas;
  for (const int replicas : std::set{0, 1, 2, 4, options.replicas}) {
    BalanceOptions with = options;
    with.replicas = replicas;
    const Placement placement =
        place_replicas({routes.begin(), routes.end()}, plans.num_ranks(), with);
    const std::vector<BalanceCopy> copies = copies_of(placement);
    const auto num_copies = static_cast<int64_t>(copies.size());
    report.outcomes.push_back(
        {replicas,
         placement.busiest(),
         max_over_mean(placement.rows_of_ranks()),
         num_copies,
         num_copies * expert_bytes}
    );
    if (replicas == options.replicas) {
      report.copies = copies;
    }
  }
  return report;
}

std::string balance_text(const BalanceReport& report) {
  Table outcomes(columns("replicas a rank|busiest rank's rows|of mean|copies|weights moved"));
  for (const BalanceOutcome& outcome : report.outcomes) {
    outcomes.add_row(
        {fmt::format("{}", outcome.replicas),
         count_text(outcome.busiest),
         fmt::format("{:.3f}", outcome.of_mean),
         count_text(outcome.copies),
         bytes_text(static_cast<double>(outcome.moved_bytes))}
    );
  }
  Table copies(columns("expert|from rank|to rank|rows there"));
  for (const BalanceCopy& copy : report.copies) {
    copies.add_row(
        {fmt::format("{}", copy.expert),
         fmt::format("{}", copy.from),
         fmt::format("{}", copy.to),
         count_text(copy.rows)}
    );
  }
  return fmt::format(
      "Balanced with up to {} replicas a rank (`balance` of a plan call does so)\n"
      "{}\n{}",
      report.replicas,
      outcomes.text(),
      copies.text()
  );
}

nlohmann::ordered_json balance_json(const BalanceReport& report) {
  auto outcomes = nlohmann::ordered_json::array();
  for (const BalanceOutcome& outcome : report.outcomes) {
    outcomes.push_back(
        {{"replicas", outcome.replicas},
         {"busiest_rows", outcome.busiest},
         {"imbalance_ranks", outcome.of_mean},
         {"copies", outcome.copies},
         {"moved_bytes", outcome.moved_bytes}}
    );
  }
  auto copies = nlohmann::ordered_json::array();
  for (const BalanceCopy& copy : report.copies) {
    copies.push_back(
        {{"expert", copy.expert}, {"from", copy.from}, {"to", copy.to}, {"rows", copy.rows}}
    );
  }
  return {{"replicas", report.replicas}, {"outcomes", outcomes}, {"copies", copies}};
}

}  // namespace weft::program
