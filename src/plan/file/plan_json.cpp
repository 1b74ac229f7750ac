// SPDX-License-Identifier: Apache-2.0
#include "plan/plan_from_json.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "plan/build.hpp"
#include "plan/check_arrivals.hpp"
#include "plan/complete_plan.hpp"
#include "plan/slots.hpp"

namespace weft {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

Layout layout_from(const JsonNode& node) {
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
    if (node.text() == layout_name(layout)) {
      return layout;
    }
  }
  node.fail(
      fmt::format("is \"{}\" (\"rank_major\", \"expert_major\" or \"expert_strided\")", node.text())
  );
}

Overflow overflow_from(const JsonNode& node) {
  if (node.text() != "drop" && node.text() != "error") {
    node.fail(fmt::format("is \"{}\" (\"drop\" or \"error\")", node.text()));
  }
  return node.text() == "error" ? Overflow::kError : Overflow::kDrop;
}

PlanShape shape_from(const JsonNode& node) {
  PlanShape shape;
  shape.num_ranks = static_cast<int>(node["num_ranks"].integer(1, kMaxInt32));
  shape.rank = static_cast<int>(node["rank"].integer(0, shape.num_ranks - 1));
  shape.num_experts = static_cast<int>(node["num_experts"].integer(1, kMaxInt32));
  if (shape.num_experts % shape.num_ranks != 0) {
    node["num_experts"].fail(
        fmt::format("is {} (a multiple of num_ranks = {})", shape.num_experts, shape.num_ranks)
    );
  }
  shape.topk = static_cast<int>(node["topk"].integer(1, kMaxTopk));
  shape.num_tokens = node["num_tokens"].integer(0, kMaxInt32 / shape.topk);
  shape.from_map = node["from_map"].boolean();
  shape.has_weights = node["has_weights"].boolean();
  shape.options.layout = layout_from(node["layout"]);
  shape.options.pad_multiple = node["pad_multiple"].integer(1, kMaxInt32);
  shape.options.expert_stride = node["expert_stride"].integer(0, kMaxInt32);
  if (const JsonNode budget = node["row_budget"]; !budget.is_null()) {
    shape.options.row_budget = budget.integer(0, kMaxInt32);
  }
  shape.options.overflow = overflow_from(node["overflow"]);
  return shape;
}

void read_padding(const JsonNode& node, PlanData& plan) {
  int64_t previous = 0;
  for (const JsonNode& pair : node.list()) {
    const std::vector<JsonNode> ends = pair.list(2);
    const int64_t begin = ends[0].integer(previous, plan.num_rows);
    previous = ends[1].integer(begin, plan.num_rows);
    plan.padding.emplace_back(begin, previous);
  }
}

void read_output(const JsonNode& node, PlanData& plan) {
  const int64_t num_local = plan.shape.num_local_experts();
  plan.num_rows = node["num_rows"].integer(0, kMaxInt32);
  plan.required_rows = node["required_rows"].integer(0, std::numeric_limits<int64_t>::max());
  plan.overflow = node["overflow"].boolean();
  plan.rows_per_expert = node["rows_per_expert"].integers_of<int64_t>(num_local);
  plan.padded_rows_per_expert = node["padded_rows_per_expert"].integers_of<int64_t>(num_local);
  plan.expert_begin = node["expert_begin"].integers_of<int64_t>(num_local);
  read_padding(node["padding"], plan);
  const bool is_rank_major = plan.shape.options.layout == Layout::kRankMajor;
  plan.row_experts = node["row_experts"].integers_of<int32_t>(
      is_rank_major ? plan.num_rows * plan.shape.topk : 0, -1
  );
  for (size_t e = 0; e < plan.expert_begin.size() && !is_rank_major; ++e) {
    const int64_t padded = plan.padded_rows_per_expert[e];
    if (plan.rows_per_expert[e] > padded || padded > plan.num_rows ||
        plan.expert_begin[e] > plan.num_rows - padded) {
      node["expert_begin"].fail(fmt::format(
          "puts expert {} at {} with {} rows, padded to {} (num_rows = {})",
          e,
          plan.expert_begin[e],
          plan.rows_per_expert[e],
          padded,
          plan.num_rows
      ));
    }
  }
}

std::vector<Arrivals> arrivals_from(
    const JsonNode& node, int num_ranks, const ArrivalBounds& bounds
) {
  std::vector<Arrivals> pairs;
  for (const JsonNode& entry : node.list(num_ranks)) {
    Arrivals arrivals;
    arrivals.one_row = bounds.one_row;
    arrivals.token = entry["token"].integers<int32_t>();
    arrivals.route_begin = entry["route_begin"].integers<int32_t>();
    arrivals.slot = entry["slot"].integers<int32_t>();
    arrivals.k = entry["k"].integers<int32_t>();
    arrivals.expert = entry["expert"].integers<int32_t>();
    arrivals.weight = entry["weight"].floats();
    if (const std::string fault = arrivals_fault(arrivals, bounds); !fault.empty()) {
      entry.fail(fmt::format("is malformed: {}", fault));
    }
    pairs.push_back(std::move(arrivals));
  }
  return pairs;
}

// `sent` says again, by receiver, what route_expert and route_slot say by token.
void check_sent(const JsonNode& node, const PlanData& plan) {
  const int per_rank = plan.shape.num_local_experts();
  int64_t sent = 0;
  for (size_t rank = 0; rank < plan.sent.size(); ++rank) {
    const Arrivals& arrivals = plan.sent[rank];
    sent += arrivals.num_routes();
    for (int64_t i = 0; i < arrivals.size(); ++i) {
      const auto token = static_cast<size_t>(arrivals.token[static_cast<size_t>(i)]);
      const auto last = static_cast<size_t>(arrivals.route_begin[static_cast<size_t>(i) + 1]);
      for (auto r = static_cast<size_t>(arrivals.route_begin[static_cast<size_t>(i)]); r < last;
           ++r) {
        const size_t route =
            token * static_cast<size_t>(plan.shape.topk) + static_cast<size_t>(arrivals.k[r]);
        const int64_t expert = static_cast<int64_t>(rank) * per_rank + arrivals.expert[r];
        if (plan.route_slot[route] != arrivals.slot[r] || plan.route_expert[route] != expert) {
          node.fail(
              fmt::format("disagrees with route_expert and route_slot (rank {}, route {})", rank, r)
          );
        }
      }
    }
  }
  const auto is_kept = [](int32_t slot) { return slot >= 0; };
  const int64_t kept = std::ranges::count_if(plan.route_slot, is_kept);
  if (sent != kept) {
    node.fail(fmt::format("has {} routes (route_slot has {})", sent, kept));
  }
}

void read_routes(const JsonNode& whole, PlanData& plan) {
  const int64_t num_routes = plan.shape.num_tokens * plan.shape.topk;
  plan.global_routes = whole["global_routes"].integers_of<int64_t>(plan.shape.num_experts);
  static_cast<void>(whole["route_expert"].list(num_routes));
  plan.route_expert = whole["route_expert"].integers<int32_t>(-1, plan.shape.num_experts - 1);
  plan.route_slot = whole["route_slot"].integers_of<int32_t>(num_routes, -1);

  ArrivalBounds bounds;
  bounds.topk = plan.shape.topk;
  bounds.num_local_experts = plan.shape.num_local_experts();
  bounds.one_row = plan.shape.options.layout == Layout::kRankMajor;
  // Of a pair's two ends, this rank's own bounds are known, the other's are not.
  bounds.num_tokens = plan.shape.num_tokens;
  bounds.num_rows = kMaxInt32;
  plan.sent = arrivals_from(whole["sent"], plan.shape.num_ranks, bounds);
  bounds.num_tokens = kMaxInt32;
  bounds.num_rows = plan.num_rows;
  add_received(plan, arrivals_from(whole["received"], plan.shape.num_ranks, bounds));
}

}  // namespace

PlanData plan_from_json(const JsonNode& whole) {
  if (const JsonNode format = whole["format"]; format.text() != kPlanFormat) {
    format.fail(fmt::format("is \"{}\" (expected \"{}\")", format.text(), kPlanFormat));
  }
  static_cast<void>(whole["version"].integer(kPlanVersion, kPlanVersion));
  PlanData plan;
  plan.shape = shape_from(whole["shape"]);
  read_output(whole["output"], plan);
  const std::vector<int32_t> row_experts = plan.row_experts;
  const std::vector<int64_t> rows_per_expert = plan.rows_per_expert;
  read_routes(whole, plan);
  if (plan.row_experts != row_experts || plan.rows_per_expert != rows_per_expert) {
    whole["received"].fail("disagrees with rows_per_expert or row_experts");
  }
  check_sent(whole["sent"], plan);
  link_tokens(plan);
  return plan;
}

}  // namespace weft
