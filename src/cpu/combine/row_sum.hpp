// SPDX-License-Identifier: Apache-2.0
// Sums of rows in fp32, in the order given, rounded once. The same bits for any vector width.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "weft/tensor.hpp"

namespace weft {

// Rows in groups, one after the other: group g ends before row group_ends[g]; none is empty.
struct RowGroups {
  std::vector<const std::byte*> rows;
  std::vector<size_t> group_ends;
  std::vector<float> weights;  // [rows.size()], or empty
  std::vector<bool> is_coded;  // by group, where sums travel coded: it is one row, which is a code

  void clear() {
    rows.clear();
    group_ends.clear();
    weights.clear();
    is_coded.clear();
  }
};

// Adds groups up: a group's sum is round(rows[0][c] * w[0] + rows[1][c] * w[1] + ...) in each
// column, each product and sum rounded to fp32; without weights the rows themselves. Then the
// groups' sums, each rounded to the dtype first, are added. At least one row; bf16, fp16 or fp32;
// `out` may not overlap a row.
//
// `next` names rows that will be summed soon: they are fetched into cache on the way, since rows
// lie in arbitrary places where no hardware looks ahead. May be empty.
void sum_groups(
    std::byte* out,
    const RowGroups& groups,
    DType dtype,
    int64_t num_cols,
    std::span<const std::byte* const> next = {}
);

// The vector target in use, e.g. "AVX3".
[[nodiscard]] const char* row_sum_target();

}  // namespace weft
