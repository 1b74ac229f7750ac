// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <limits>

#include "plan/build.hpp"

namespace weft {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

// Checks counts: they come from other processes.
void check_counts(std::span<const RankCounts> counts, int num_experts, const Context& context) {
  const auto is_negative = [](int32_t count) { return count < 0; };
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    const RankCounts& one = counts[rank];
    const bool sound = one.routes.size() == static_cast<size_t>(num_experts) &&
                       one.arrivals.size() == counts.size() && one.num_tokens >= 0 &&
                       std::ranges::none_of(one.routes, is_negative) &&
                       std::ranges::none_of(one.arrivals, is_negative);
    WEFT_CHECK(
        context, sound, ErrorCode::kInternal, "plan: the counts of rank {} are malformed", rank
    );
  }
}

// Has one row per arrival.
OutputShape rank_major_output(int64_t arrivals, int64_t budget) {
  OutputShape output = {.required_rows = arrivals, .num_rows = budget < 0 ? arrivals : budget};
  output.overflow = output.required_rows > output.num_rows;
  return output;
}

// Lays the blocks of one rank's experts behind each other.
OutputShape expert_output(
    const BlockRule& rule, int64_t budget, int64_t largest, std::span<ExpertBlock> blocks
) {
  OutputShape output;
  int64_t next = 0;
  for (ExpertBlock& block : blocks) {
    block.begin = next;
    next += block_step(rule, block.rows);
  }
  output.required_rows = rule.strided ? largest * static_cast<int64_t>(blocks.size()) : next;
  output.num_rows = budget < 0 ? next : budget;
  for (ExpertBlock& block : blocks) {
    block.limit = block_limit(rule, block.begin, output.num_rows);
    output.overflow |= rows_within(block.begin, block.rows, block.limit) < block.rows;
  }
  return output;
}

void refuse_overflow(
    const GroupShape& shape, size_t rank, const PlanOptions& options, const Context& context
) {
  const OutputShape& output = shape.outputs[rank];
  const auto refuse = [&](const std::string& who, int64_t rows, std::string_view name, int64_t room
                      ) {
    const std::string problem =
        fmt::format("plan: {} needs {} rows ({} = {})", who, rows, name, room);
    raise_error(ErrorCode::kInvalidArgument, context, problem);
  };
  if (options.layout != Layout::kExpertStrided) {
    refuse(fmt::format("rank {}", rank), output.required_rows, "row_budget", output.num_rows);
  }
  size_t expert = rank * (shape.experts.size() / shape.outputs.size());
  while (shape.experts[expert].rows <= shape.rule.stride) {
    ++expert;
  }
  const std::string who = fmt::format("expert {} on rank {}", expert, rank);
  refuse(who, shape.experts[expert].rows, "expert_stride", shape.rule.stride);
}

}  // namespace

GroupShape group_shape(
    std::span<const RankCounts> counts,
    int num_experts,
    const PlanOptions& options,
    const Context& context
) {
  check_counts(counts, num_experts, context);
  GroupTotals totals = {
      .routes = std::vector<int64_t>(static_cast<size_t>(num_experts)),
      .arrivals = std::vector<int64_t>(counts.size())};
  for (const RankCounts& one : counts) {
    std::ranges::transform(totals.routes, one.routes, totals.routes.begin(), std::plus());
    std::ranges::transform(totals.arrivals, one.arrivals, totals.arrivals.begin(), std::plus());
    totals.budgets.push_back(one.row_budget);
  }
  return group_shape(totals, options, context);
}

GroupShape group_shape(
    const GroupTotals& totals, const PlanOptions& options, const Context& context
) {
  GroupShape shape;
  shape.rule = {
      options.layout == Layout::kExpertStrided, options.pad_multiple, options.expert_stride};
  int64_t largest = 0;
  for (const int64_t rows : totals.routes) {
    shape.experts.push_back({.rows = rows});
    largest = std::max(largest, padded_count(rows, shape.rule.pad_multiple));
  }
  if (shape.rule.strided && shape.rule.stride == 0) {
    shape.rule.stride = largest;
  }

  const size_t num_ranks = totals.arrivals.size();
  const size_t per_rank = shape.experts.size() / num_ranks;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    const auto blocks = std::span(shape.experts).subspan(rank * per_rank, per_rank);
    const int64_t budget = totals.budgets[rank];
    shape.outputs.push_back(
        options.layout == Layout::kRankMajor ? rank_major_output(totals.arrivals[rank], budget)
                                             : expert_output(shape.rule, budget, largest, blocks)
    );
    WEFT_CHECK_ARG(
        context,
        shape.outputs[rank].num_rows <= kMaxRows,
        "plan: rank {} needs {} rows (slots number at most {})",
        rank,
        shape.outputs[rank].num_rows,
        kMaxRows
    );
  }
  for (size_t rank = 0; rank < num_ranks && options.overflow == Overflow::kError; ++rank) {
    if (shape.outputs[rank].overflow) {
      refuse_overflow(shape, rank, options, context);
    }
  }
  return shape;
}

}  // namespace weft
