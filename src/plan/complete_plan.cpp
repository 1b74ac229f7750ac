// SPDX-License-Identifier: Apache-2.0
#include "plan/complete_plan.hpp"

#include "plan/build.hpp"

namespace weft {
namespace {

void note_row_experts(PlanData& plan, const Arrivals& from) {
  const auto topk = static_cast<size_t>(plan.shape.topk);
  for (size_t i = 0; i < from.slot.size(); ++i) {
    plan.row_experts[static_cast<size_t>(from.slot[i]) * topk + static_cast<size_t>(from.k[i])] =
        from.expert[i];
    ++plan.rows_per_expert[static_cast<size_t>(from.expert[i])];
  }
}

}  // namespace

void link_tokens(PlanData& plan) {
  plan.token_begin.assign(static_cast<size_t>(plan.shape.num_tokens) + 1, 0);
  for (const Arrivals& arrivals : plan.sent) {
    for (const int32_t token : arrivals.token) {
      ++plan.token_begin[static_cast<size_t>(token) + 1];
    }
  }
  for (size_t t = 1; t < plan.token_begin.size(); ++t) {
    plan.token_begin[t] += plan.token_begin[t - 1];
  }
  // Ranks in ascending order, so that each token's arrivals come out ascending as well.
  std::vector<int32_t> next(plan.token_begin.begin(), plan.token_begin.end() - 1);
  plan.token_arrivals.resize(static_cast<size_t>(plan.token_begin.back()));
  for (size_t rank = 0; rank < plan.sent.size(); ++rank) {
    const std::vector<int32_t>& tokens = plan.sent[rank].token;
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto place = static_cast<size_t>(next[static_cast<size_t>(tokens[i])]++);
      plan.token_arrivals[place] = {static_cast<int32_t>(rank), static_cast<int32_t>(i)};
    }
  }
}

void add_received(PlanData& plan, std::vector<Arrivals> received) {
  plan.received = std::move(received);
  if (plan.shape.options.layout != Layout::kRankMajor) {
    return;
  }
  // Only arrivals tell which routes of a dropped row are gone.
  plan.rows_per_expert.assign(plan.rows_per_expert.size(), 0);
  plan.row_experts.assign(
      static_cast<size_t>(plan.num_rows) * static_cast<size_t>(plan.shape.topk), -1
  );
  for (const Arrivals& from : plan.received) {
    note_row_experts(plan, from);
  }
  plan.padded_rows_per_expert = plan.rows_per_expert;
}

}  // namespace weft
