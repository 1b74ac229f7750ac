// SPDX-License-Identifier: Apache-2.0
// What dispatch writes beside rows, weights and scales: what the plan says of them, and another
// order of scales. Previous: call.cpp, once all rows have come; next: the caller.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

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

// DispatchOutput::scales_by_column: `by_row` [num_rows] to `out`, slack excluded.
inline void lay_by_column(const PlanData& plan, const ConstTensor& by_row, const Tensor& out) {
  constexpr size_t kWord = 4;
  const auto words = static_cast<size_t>(by_row.row_bytes()) / kWord;
  const auto stride = static_cast<size_t>(plan.num_rows) / plan.padded_rows_per_expert.size();
  for (size_t expert = 0; expert < plan.padded_rows_per_expert.size(); ++expert) {
    const auto num_rows = static_cast<size_t>(plan.padded_rows_per_expert[expert]);
    const size_t block = expert * stride * words;
    for (size_t row = 0; row < num_rows; ++row) {
      for (size_t word = 0; word < words; ++word) {
        const std::byte* from = by_row.data + (block + row * words + word) * kWord;
        std::memcpy(out.data + (block + word * stride + row) * kWord, from, kWord);
      }
    }
  }
}

// scale_rows: the scales as they have come, if they are wanted by column.
inline void write_beside(
    const PlanData& plan, const ConstTensor& scale_rows, const DispatchOutput& out
) {
  if (out.scales_by_column) {
    lay_by_column(plan, scale_rows, out.scales);
  }
  if (out.sources.is_given()) {
    tell_sources(plan, out.sources);
  }
  if (out.experts.is_given()) {
    tell_experts(plan, out.experts);
  }
  tell_counts(plan, out);
}

}  // namespace weft
