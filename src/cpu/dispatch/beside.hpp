// SPDX-License-Identifier: Apache-2.0
// Outputs of dispatch beside rows, weights and scales: what the plan says of rows, and scales in
// another order. Previous: call.cpp, once all rows have come; next: the caller.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "call/scale_layout.hpp"
#include "plan/plan_data.hpp"
#include "weft/calls.hpp"

namespace weft {

inline void tell_sources(const PlanData& plan, const Tensor& sources) {
  auto* out = reinterpret_cast<int32_t*>(sources.data);
  for_each_row(plan, [&](int32_t row, int32_t source, int32_t token) {
    const size_t place = 2 * static_cast<size_t>(row);
    out[place] = source;
    out[place + 1] = token;
  });
}

inline void tell_experts(const PlanData& plan, const Tensor& experts) {
  auto* out = reinterpret_cast<int64_t*>(experts.data);
  const auto topk = static_cast<size_t>(experts.cols);
  std::fill_n(out, static_cast<size_t>(plan.num_rows) * topk, int64_t{-1});
  for_each_route(plan, [&](int32_t row, int32_t k, int32_t expert) {
    out[static_cast<size_t>(row) * topk + static_cast<size_t>(k)] = expert;
  });
}

inline void tell_counts(const PlanData& plan, const DispatchOutput& out) {
  auto* counts = reinterpret_cast<int32_t*>(out.counts.data);
  auto* sums = reinterpret_cast<int32_t*>(out.count_sums.data);
  for (size_t expert = 0; expert < plan.rows_per_expert.size(); ++expert) {
    const auto rows = static_cast<int32_t>(plan.rows_per_expert[expert]);
    if (counts != nullptr) {
      counts[expert] = rows;
    }
    if (sums != nullptr) {
      sums[expert] += rows;
    }
  }
}

// Stores `by_row` [num_rows] in `out` by another layout, slack excluded.
inline void lay_scales(
    const PlanData& plan, const std::byte* by_row, const Tensor& out, ScaleLayout layout
) {
  const int64_t row_bytes = out.row_bytes();
  const auto num_experts = static_cast<int32_t>(plan.padded_rows_per_expert.size());
  const auto stride = static_cast<int32_t>(plan.num_rows) / num_experts;
  for (int32_t expert = 0; expert < num_experts; ++expert) {
    const auto num_rows =
        static_cast<int32_t>(plan.padded_rows_per_expert[static_cast<size_t>(expert)]);
    for (int32_t row = expert * stride; row < expert * stride + num_rows; ++row) {
      const ScaleWords place = scale_words(layout, row_bytes, stride, row);
      for (int64_t word = 0; word < row_bytes / kScaleWord; ++word) {
        const std::byte* from = by_row + row * row_bytes + word * kScaleWord;
        std::memcpy(out.data + place.first + word * place.step, from, size_t{kScaleWord});
      }
    }
  }
}

// Writes `scale_rows`, the scales that came, if wanted by another layout, and experts.
inline void write_beside(
    const PlanData& plan, const std::byte* scale_rows, const DispatchOutput& out
) {
  if (out.scale_layout != ScaleLayout::kByRow) {
    lay_scales(plan, scale_rows, out.scales, out.scale_layout);
  }
  if (out.experts.is_given()) {
    tell_experts(plan, out.experts);
  }
}

// Writes sources and counts once the call is over: it may have been repeated without lost ranks,
// whose rows of zeros count, and keep their sources, like all others.
inline void tell_rows(const PlanData& plan, const DispatchOutput& out) {
  if (out.sources.is_given()) {
    tell_sources(plan, out.sources);
  }
  tell_counts(plan, out);
}

}  // namespace weft
