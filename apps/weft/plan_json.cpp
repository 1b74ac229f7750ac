// SPDX-License-Identifier: Apache-2.0
// A PlanReport for other programs and for a browser.
#include <fmt/format.h>

#include <algorithm>

#include "plan_report.hpp"
#include "svg.hpp"

namespace weft::program {
namespace {

using Json = nlohmann::ordered_json;

template <class T>
std::vector<T> copy_of(std::span<const T> values) {
  return {values.begin(), values.end()};
}

Json rank_json(const Plan& plan, int64_t row_bytes, bool with_slots) {
  Json json = {
      {"rank", plan.rank()},
      {"num_tokens", plan.num_tokens()},
      {"num_rows", plan.num_rows()},
      {"required_rows", plan.required_rows()},
      {"overflow", plan.overflow()},
      {"wire_bytes", plan.wire_bytes(row_bytes)},
      {"logical_bytes", plan.logical_bytes(row_bytes)},
      {"rows_per_expert", copy_of(plan.rows_per_expert())},
      {"padded_rows_per_expert", copy_of(plan.padded_rows_per_expert())},
      {"expert_begin", copy_of(plan.expert_begin())}};
  if (with_slots) {
    json["topk_idx"] = plan.data().route_expert;
    json["route_slots"] = plan.data().route_slot;
  }
  return json;
}

std::vector<std::string> numbers(int count, const char* prefix) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) {
    names.push_back(fmt::format("{}{}", prefix, i));
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

BarChart rows_per_expert(const PlanReport& report) {
  BarChart chart = {
      "Rows per expert", "expert", "rows", numbers(report.num_experts(), ""), {{"rows", {}, {}}}};
  const bool is_padded = report.plans.front().layout() != Layout::kRankMajor &&
                         report.plans.front().pad_multiple() > 1;
  if (is_padded) {
    chart.series = {{"rows", {}, {}}, {"padding", {}, {}}};
    chart.is_nested = true;
  }
  for (const Plan& plan : report.plans) {
    for (size_t e = 0; e < plan.rows_per_expert().size(); ++e) {
      chart.series[0].y.push_back(static_cast<double>(plan.rows_per_expert()[e]));
      if (is_padded) {
        chart.series[1].y.push_back(static_cast<double>(plan.padded_rows_per_expert()[e]));
      }
    }
  }
  return chart;
}

}  // namespace

Json plan_json(const PlanReport& report, bool with_slots) {
  const Plan& first = report.plans.front();
  Json json = {
      {"source", report.source},
      {"num_ranks", report.num_ranks()},
      {"num_experts", report.num_experts()},
      {"topk", first.topk()},
      {"layout", layout_name(first.layout())},
      {"pad_multiple", first.pad_multiple()},
      {"hidden", report.hidden},
      {"dtype", dtype_name(report.dtype)},
      {"row_bytes", report.row_bytes()},
      {"num_routes", report.num_routes},
      {"num_arrivals", report.num_arrivals},
      {"imbalance_experts", report.imbalance.of_experts},
      {"imbalance_ranks", report.imbalance.of_ranks},
      {"routes_per_expert", copy_of(first.global_routes_per_expert())},
      {"sent_bytes", report.sent_bytes},
      {"ranks", Json::array()}};
  for (const Plan& plan : report.plans) {
    json["ranks"].push_back(rank_json(plan, report.row_bytes(), with_slots));
  }
  return json;
}

void add_plan_figures(const PlanReport& report, Page& page) {
  const auto ranks = numbers(report.num_ranks(), "");
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
  page.add_figure(svg(HeatMap{
      "Routes from rank to expert",
      "expert",
      "from rank",
      "routes",
      ranks,
      numbers(report.num_experts(), ""),
      as_doubles(report.routes_by_source)}));
}

}  // namespace weft::program
