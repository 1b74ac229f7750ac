// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "plan/build.hpp"

namespace weft {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

// Counts come from other processes.
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

// One row per arrival.
OutputShape rank_major_output(std::span<const RankCounts> counts, size_t rank) {
  OutputShape output;
  for (const RankCounts& source : counts) {
    output.required_rows += source.arrivals[rank];
  }
  const int64_t budget = counts[rank].row_budget;
  output.num_rows = budget < 0 ? output.required_rows : budget;
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

[[noreturn]] void refuse_overflow(
    const GroupShape& shape, size_t rank, const PlanOptions& options, const Context& context
) {
  const OutputShape& output = shape.outputs[rank];
  if (options.layout != Layout::kExpertStrided) {
    WEFT_RAISE(
        context,
        ErrorCode::kInvalidArgument,
        "plan: rank {} needs {} rows (row_budget = {})",
        rank,
        output.required_rows,
        output.num_rows
    );
  }
  const size_t per_rank = shape.experts.size() / shape.outputs.size();
  size_t expert = rank * per_rank;
  while (shape.experts[expert].rows <= shape.rule.stride) {
    ++expert;
  }
  WEFT_RAISE(
      context,
      ErrorCode::kInvalidArgument,
      "plan: expert {} on rank {} needs {} rows (expert_stride = {})",
      expert,
      rank,
      shape.experts[expert].rows,
      shape.rule.stride
  );
}

}  // namespace

GroupShape group_shape(
    std::span<const RankCounts> counts,
    int num_experts,
    const PlanOptions& options,
    const Context& context
) {
  check_counts(counts, num_experts, context);
  GroupShape shape;
  shape.experts.resize(static_cast<size_t>(num_experts));
  shape.outputs.resize(counts.size());
  shape.rule = {
      options.layout == Layout::kExpertStrided, options.pad_multiple, options.expert_stride};
  int64_t largest = 0;
  for (size_t e = 0; e < shape.experts.size(); ++e) {
    int64_t& rows = shape.experts[e].rows;
    for (const RankCounts& one : counts) {
      rows += one.routes[e];
    }
    largest = std::max(largest, padded_count(rows, shape.rule.pad_multiple));
  }
  if (shape.rule.strided && shape.rule.stride == 0) {
    shape.rule.stride = largest;
  }

  const size_t per_rank = shape.experts.size() / counts.size();
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    const auto blocks = std::span(shape.experts).subspan(rank * per_rank, per_rank);
    shape.outputs[rank] = options.layout == Layout::kRankMajor
                              ? rank_major_output(counts, rank)
                              : expert_output(shape.rule, counts[rank].row_budget, largest, blocks);
    WEFT_CHECK_ARG(
        context,
        shape.outputs[rank].num_rows <= kMaxRows,
        "plan: rank {} needs {} rows (slots number at most {})",
        rank,
        shape.outputs[rank].num_rows,
        kMaxRows
    );
  }
  for (size_t rank = 0; rank < counts.size() && options.overflow == Overflow::kError; ++rank) {
    if (shape.outputs[rank].overflow) {
      refuse_overflow(shape, rank, options, context);
    }
  }
  return shape;
}

}  // namespace weft
