// SPDX-License-Identifier: Apache-2.0
// A PlanReport for a terminal: plain characters only, so that it survives any pipe.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <span>

#include "plan_report.hpp"
#include "shades.hpp"

namespace weft::program {
namespace {

constexpr size_t kPictureWidth = 64;
constexpr size_t kNumBusiest = 5;
constexpr int kBarWidth = 40;

int64_t sum_of(std::span<const int64_t> values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

// One line per source rank, one character per expert (or group of experts).
std::string shaded_lines(const PlanReport& report) {
  const auto num_experts = static_cast<size_t>(report.num_experts());
  const size_t group = (num_experts + kPictureWidth - 1) / kPictureWidth;
  const size_t num_columns = (num_experts + group - 1) / group;
  std::vector<double> cells;
  for (size_t i = 0; i < report.plans.size(); ++i) {
    for (size_t c = 0; c < num_columns; ++c) {
      const auto row = std::span(report.routes_by_source).subspan(i * num_experts, num_experts);
      const size_t size = std::min(group, num_experts - c * group);
      cells.push_back(
          static_cast<double>(sum_of(row.subspan(c * group, size))) / static_cast<double>(size)
      );
    }
  }
  const double high = *std::max_element(cells.begin(), cells.end());
  std::string out = fmt::format(
      "Routes, one line per source rank, one column per {} (blank = 0, @ = {:.4g}):\n",
      group == 1 ? "expert" : fmt::format("{} experts", group),
      high
  );
  for (size_t i = 0; i < report.plans.size(); ++i) {
    const auto line = std::span(cells).subspan(i * num_columns, num_columns);
    out += fmt::format("  rank {:>3} |{}|\n", i, shaded(line, high));
  }
  return out;
}

std::string busiest_experts(const PlanReport& report) {
  const auto totals = report.plans.front().global_routes_per_expert();
  std::vector<size_t> order(totals.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return totals[a] > totals[b];
  });
  order.resize(std::min(order.size(), kNumBusiest));
  const double high = static_cast<double>(totals[order.front()]);
  std::string out = "Busiest experts:\n";
  for (const size_t expert : order) {
    const double part = high > 0 ? static_cast<double>(totals[expert]) / high : 0;
    out += fmt::format(
        "  expert {:>4} on rank {:>3} {:>10} {}\n",
        expert,
        expert / static_cast<size_t>(report.plans.front().num_local_experts()),
        count_text(totals[expert]),
        std::string(static_cast<size_t>(part * kBarWidth), '#')
    );
  }
  return out;
}

}  // namespace

std::string plan_summary(const PlanReport& report) {
  const Plan& first = report.plans.front();
  const auto arrivals = static_cast<double>(report.num_arrivals);
  const bool has_overflow = std::any_of(
      report.plans.begin(), report.plans.end(), [](const Plan& plan) { return plan.overflow(); }
  );
  std::string out = fmt::format(
      "{}\n{} ranks, {} experts, top-{}, {}{}, rows of {} x {} = {}\n",
      report.source,
      report.num_ranks(),
      report.num_experts(),
      first.topk(),
      layout_name(first.layout()),
      first.pad_multiple() > 1 ? fmt::format(" padded to {}", first.pad_multiple()) : "",
      report.hidden,
      dtype_name(report.dtype),
      bytes_text(static_cast<double>(report.row_bytes()))
  );
  out += fmt::format(
      "{} routes travel as {} arrivals ({:.2f} routes each)\n",
      count_text(report.num_routes),
      count_text(report.num_arrivals),
      arrivals > 0 ? static_cast<double>(report.num_routes) / arrivals : 0
  );
  out += fmt::format(
      "Imbalance, max / mean (1 = even): experts {:.2f}, ranks {:.2f}\n",
      report.imbalance.of_experts,
      report.imbalance.of_ranks
  );
  return has_overflow ? out + "Overflow: some routes are dropped for lack of room\n" : out;
}

Table plan_rank_table(const PlanReport& report) {
  Table table(
      {"rank",
       "tokens",
       "rows",
       "required",
       "padding",
       "duplicates",
       "wire out",
       "wire in",
       "logical"}
  );
  for (const Plan& plan : report.plans) {
    const auto size = static_cast<size_t>(report.num_ranks());
    const auto self = static_cast<size_t>(plan.rank());
    int64_t wire_in = 0;
    int64_t arrivals = 0;
    int64_t padding = 0;
    for (size_t from = 0; from < size; ++from) {
      wire_in += from == self ? 0 : report.sent_bytes[from * size + self];
      arrivals += plan.received_arrivals(static_cast<int>(from));
    }
    for (const auto& [begin, end] : plan.data().padding) {
      padding += end - begin;
    }
    const int64_t kept = plan.logical_bytes(1);
    table.add_row(
        {fmt::format("{}", plan.rank()),
         count_text(plan.num_tokens()),
         count_text(plan.num_rows()),
         count_text(plan.required_rows()),
         count_text(padding),
         count_text(kept - arrivals),
         bytes_text(static_cast<double>(plan.wire_bytes(report.row_bytes()))),
         bytes_text(static_cast<double>(wire_in)),
         bytes_text(static_cast<double>(plan.logical_bytes(report.row_bytes())))}
    );
  }
  return table;
}

std::string plan_picture(const PlanReport& report) {
  return shaded_lines(report) + "\n" + busiest_experts(report);
}

}  // namespace weft::program
