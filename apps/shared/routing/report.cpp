// SPDX-License-Identifier: Apache-2.0
#include "routing/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <span>
#include <utility>

#include "report/svg.hpp"
#include "report/table.hpp"

namespace weft::program {
namespace {

constexpr size_t kPictureWidth = 64;
constexpr size_t kNumBusiest = 5;
constexpr int kBarWidth = 40;

int64_t sum_of(std::span<const int64_t> values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

std::vector<std::string> numbers(int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) {
    names.push_back(fmt::format("{}", i));
  }
  return names;
}

std::vector<double> as_doubles(std::span<const int64_t> values, double unit = 1) {
  std::vector<double> out;
  for (const int64_t value : values) {
    out.push_back(static_cast<double>(value) / unit);
  }
  return out;
}

HeatMap routes_by_source(const PlanReport& report) {
  return {
      "Routes from rank to expert",
      "expert",
      "from rank",
      "routes",
      numbers(report.num_ranks()),
      numbers(report.num_experts()),
      as_doubles(report.routes_by_source)};
}

// One line per source rank, one character per expert (or group of experts).
std::string shaded_lines(const PlanReport& report) {
  const HeatMap map = with_fewer_columns(routes_by_source(report), kPictureWidth);
  const size_t num_columns = map.columns.size();
  const std::string group = num_columns > 1 ? map.columns[1] : "1";  // where the second begins
  const double high = std::ranges::max(map.values);
  std::string out = fmt::format(
      "Routes, one line per source rank, one column per {} (blank = 0, @ = {:.4g}):\n",
      group == "1" ? "expert" : group + " experts",
      high
  );
  for (size_t i = 0; i < map.rows.size(); ++i) {
    const auto line = std::span(map.values).subspan(i * num_columns, num_columns);
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

using Json = nlohmann::ordered_json;

Json rank_json(const Plan& plan, int64_t row_bytes, bool with_slots) {
  Json json = {
      {"rank", plan.rank()},
      {"num_tokens", plan.num_tokens()},
      {"num_rows", plan.num_rows()},
      {"required_rows", plan.required_rows()},
      {"overflow", plan.overflow()},
      {"wire_bytes", plan.wire_bytes(row_bytes)},
      {"logical_bytes", plan.logical_bytes(row_bytes)},
      {"rows_per_expert", plan.rows_per_expert()},
      {"padded_rows_per_expert", plan.padded_rows_per_expert()},
      {"expert_begin", plan.expert_begin()}};
  if (with_slots) {
    json["topk_idx"] = contents_of(plan).route_expert;
    json["route_slots"] = contents_of(plan).route_slot;
  }
  return json;
}

BarChart rows_per_expert(const PlanReport& report) {
  Series rows = {"rows", {}, {}};
  Series padded = {"padding", {}, {}};
  for (const Plan& plan : report.plans) {
    std::ranges::copy(plan.rows_per_expert(), std::back_inserter(rows.y));
    std::ranges::copy(plan.padded_rows_per_expert(), std::back_inserter(padded.y));
  }
  BarChart chart = {"Rows per expert", "expert", "rows", numbers(report.num_experts()), {rows}};
  const Plan& first = report.plans.front();
  if (first.layout() != Layout::kRankMajor && first.pad_multiple() > 1) {
    chart.series.push_back(padded);
    chart.is_nested = true;
  }
  return chart;
}

}  // namespace

std::vector<int64_t> routes_of(const RouteTable& table, int num_experts) {
  std::vector<int64_t> counts(static_cast<size_t>(num_experts), 0);
  for (const int32_t expert : table.expert) {
    if (expert >= 0) {
      ++counts[static_cast<size_t>(expert)];
    }
  }
  return counts;
}

double max_over_mean(const std::vector<int64_t>& counts) {
  const int64_t sum = sum_of(counts);
  if (sum == 0) {
    return 1;
  }
  const auto largest = static_cast<double>(std::ranges::max(counts));
  return largest * static_cast<double>(counts.size()) / static_cast<double>(sum);
}

Imbalance imbalance_of(const std::vector<int64_t>& routes_per_expert, int num_ranks) {
  std::vector<int64_t> per_rank(static_cast<size_t>(num_ranks), 0);
  const size_t num_local = routes_per_expert.size() / per_rank.size();
  for (size_t e = 0; e < routes_per_expert.size(); ++e) {
    per_rank[e / num_local] += routes_per_expert[e];
  }
  return {max_over_mean(routes_per_expert), max_over_mean(per_rank)};
}

PlanReport make_plan_report(
    std::string source,
    const std::vector<RouteTable>& routes,
    int num_experts,
    const PlanOptions& options,
    const RowFormat& format
) {
  PlanReport report;
  report.source = std::move(source);
  report.format = format;
  report.plans = build_plans(routes, num_experts, options);
  for (const RouteTable& table : routes) {
    const auto counts = routes_of(table, num_experts);
    report.routes_by_source.insert(report.routes_by_source.end(), counts.begin(), counts.end());
  }
  for (const Plan& plan : report.plans) {
    for (int to = 0; to < plan.num_ranks(); ++to) {
      report.sent_bytes.push_back(plan.sent_arrivals(to) * report.row_bytes());
      report.num_arrivals += plan.sent_arrivals(to);
    }
  }
  const auto totals = report.plans.front().global_routes_per_expert();
  report.num_routes = sum_of(totals);
  report.imbalance = imbalance_of({totals.begin(), totals.end()}, report.num_ranks());
  return report;
}

std::string plan_summary(const PlanReport& report) {
  const Plan& first = report.plans.front();
  const auto arrivals = static_cast<double>(report.num_arrivals);
  const bool has_overflow = std::ranges::any_of(report.plans, &Plan::overflow);
  std::string out = fmt::format(
      "{}\n{} ranks, {} experts, top-{}, {}{}, rows of {} x {} = {}\n",
      report.source,
      report.num_ranks(),
      report.num_experts(),
      first.topk(),
      layout_name(first.layout()),
      first.pad_multiple() > 1 ? fmt::format(" padded to {}", first.pad_multiple()) : "",
      report.format.hidden,
      dtype_name(report.format.dtype),
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
  Table table(columns("rank|tokens|rows|required|padding|duplicates|wire out|wire in|logical"));
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
    for (const auto& [begin, end] : contents_of(plan).padding) {
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

Json plan_json(const PlanReport& report, bool with_slots) {
  const Plan& first = report.plans.front();
  Json json = {
      {"source", report.source},
      {"num_ranks", report.num_ranks()},
      {"num_experts", report.num_experts()},
      {"topk", first.topk()},
      {"layout", layout_name(first.layout())},
      {"pad_multiple", first.pad_multiple()},
      {"hidden", report.format.hidden},
      {"dtype", dtype_name(report.format.dtype)},
      {"row_bytes", report.row_bytes()},
      {"num_routes", report.num_routes},
      {"num_arrivals", report.num_arrivals},
      {"imbalance_experts", report.imbalance.of_experts},
      {"imbalance_ranks", report.imbalance.of_ranks},
      {"routes_per_expert", first.global_routes_per_expert()},
      {"sent_bytes", report.sent_bytes},
      {"ranks", Json::array()}};
  for (const Plan& plan : report.plans) {
    json["ranks"].push_back(rank_json(plan, report.row_bytes(), with_slots));
  }
  return json;
}

void add_plan_figures(const PlanReport& report, Page& page) {
  const auto ranks = numbers(report.num_ranks());
  page.add_figure(
      svg(HeatMap{
          "Bytes of rows from rank to rank",
          "to rank",
          "from rank",
          "MB",
          ranks,
          ranks,
          as_doubles(report.sent_bytes, 1e6)}),
      "One row per token and rank, whatever the number of its experts there. What a rank keeps for "
      "itself (the diagonal) does not cross the wire."
  );
  page.add_figure(svg(rows_per_expert(report)));
  page.add_figure(svg(routes_by_source(report)));
}

}  // namespace weft::program
