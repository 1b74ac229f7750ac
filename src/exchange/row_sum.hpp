// SPDX-License-Identifier: Apache-2.0
// Sums of rows in fp32, in the order given, rounded once. The same bits for any vector width.
#pragma once

#include <cstdint>
#include <span>

#include "weft/tensor.hpp"

namespace weft {

// out[c] = round(rows[0][c] * w[0] + rows[1][c] * w[1] + ...), each product and each sum rounded to
// fp32; without weights the rows themselves. `rows` is not empty; bf16, fp16 or fp32; `out` may not
// overlap a row.
//
// `next` names rows that will be summed soon: they are fetched into cache on the way, since rows
// lie in arbitrary places where no hardware looks ahead. May be empty.
void sum_rows(
    std::byte* out,
    std::span<const std::byte* const> rows,
    const float* weights,
    DType dtype,
    int64_t num_cols,
    std::span<const std::byte* const> next = {}
);

// The vector target in use, e.g. "AVX3".
[[nodiscard]] const char* row_sum_target();

}  // namespace weft
