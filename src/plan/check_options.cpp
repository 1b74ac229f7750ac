// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "plan/build.hpp"

namespace weft {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

void check_layout(const PlanOptions& options, const Context& context) {
  switch (options.layout) {
    case Layout::kRankMajor:
      WEFT_CHECK_ARG(
          context,
          options.pad_multiple == 1,
          "plan: pad_multiple = {} (must be 1 with rank_major, whose rows have no expert blocks)",
          options.pad_multiple
      );
      break;
    case Layout::kExpertMajor:
      break;
    case Layout::kExpertStrided:
      WEFT_CHECK_ARG(
          context,
          !options.row_budget,
          "plan: row_budget = {} with expert_strided (its budget is expert_stride)",
          options.row_budget.value_or(0)
      );
      return;
    default:
      raise_error(
          ErrorCode::kInvalidArgument,
          context,
          fmt::format(
              "plan: layout = {} is unknown (0 to 2)", static_cast<unsigned>(options.layout)
          )
      );
  }
  WEFT_CHECK_ARG(
      context,
      options.expert_stride == 0,
      "plan: expert_stride = {} with {} (only expert_strided has a stride)",
      options.expert_stride,
      layout_name(options.layout)
  );
}

}  // namespace

void check_options(const PlanOptions& options, const Context& context) {
  WEFT_CHECK_ARG(
      context,
      options.pad_multiple >= 1 && options.pad_multiple <= kMaxRows,
      "plan: pad_multiple = {} is out of range (1 to {})",
      options.pad_multiple,
      kMaxRows
  );
  WEFT_CHECK_ARG(
      context,
      options.expert_stride >= 0 && options.expert_stride <= kMaxRows,
      "plan: expert_stride = {} is out of range (0 to {})",
      options.expert_stride,
      kMaxRows
  );
  const int64_t budget = options.row_budget.value_or(0);
  WEFT_CHECK_ARG(
      context,
      budget >= 0 && budget <= kMaxRows,
      "plan: row_budget = {} is out of range (0 to {})",
      budget,
      kMaxRows
  );
  WEFT_CHECK_ARG(
      context,
      options.overflow == Overflow::kDrop || options.overflow == Overflow::kError,
      "plan: overflow = {} is unknown (0 or 1)",
      static_cast<unsigned>(options.overflow)
  );
  check_layout(options, context);
}

std::optional<int64_t> given_rows(const PlanOptions& options, int num_local_experts) {
  if (options.overflow == Overflow::kError) {
    return std::nullopt;
  }
  if (options.layout == Layout::kExpertStrided) {
    return options.expert_stride > 0 ? std::optional(options.expert_stride * num_local_experts)
                                     : std::nullopt;
  }
  return options.row_budget;
}

}  // namespace weft
