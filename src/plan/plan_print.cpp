// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <ostream>

#include "plan/plan_data.hpp"

namespace weft {
namespace {

std::string layout_text(const PlanShape& shape) {
  std::string text(layout_name(shape.options.layout));
  if (shape.options.pad_multiple > 1) {
    text += fmt::format(", padded to {}", shape.options.pad_multiple);
  }
  if (shape.options.layout == Layout::kExpertStrided) {
    text += fmt::format(", stride {}", shape.options.expert_stride);
  }
  return text;
}

int64_t num_arrivals(const std::vector<Arrivals>& pairs) {
  const auto add = [](int64_t sum, const Arrivals& pair) { return sum + pair.size(); };
  return std::accumulate(pairs.begin(), pairs.end(), int64_t{0}, add);
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Plan& plan) {
  const PlanData& data = plan.data();
  const auto rows = plan.rows_per_expert();
  const auto own = static_cast<size_t>(plan.rank());
  const int64_t kept = plan.logical_bytes(1);
  const int64_t sent = num_arrivals(data.sent);
  const int64_t received = num_arrivals(data.received);
  const auto [least, most] = std::ranges::minmax(rows);
  const double mean =
      static_cast<double>(std::reduce(rows.begin(), rows.end())) / static_cast<double>(rows.size());

  out << fmt::format(
      "plan of rank {}/{}: {}\n", plan.rank(), plan.num_ranks(), layout_text(data.shape)
  );
  out << fmt::format(
      "  routing   {} tokens, top {} of {} experts, {} here{}\n",
      plan.num_tokens(),
      plan.topk(),
      plan.num_experts(),
      plan.num_local_experts(),
      plan.from_map() ? ", from a map" : ""
  );
  out << fmt::format(
      "  output    {} rows, {} with a token ({} required){}\n",
      plan.num_rows(),
      kept,
      plan.required_rows(),
      plan.overflow() ? ", routes to or from this rank were dropped" : ""
  );
  out << fmt::format(
      "  arrivals  {} sent, {} of them to other ranks; {} received, {} from other ranks\n",
      sent,
      sent - data.sent[own].size(),
      received,
      received - data.received[own].size()
  );
  out << fmt::format("  experts   {} to {} rows, {:.1f} on average\n", least, most, mean);
  return out;
}

}  // namespace weft
