// SPDX-License-Identifier: Apache-2.0
// What a difference between two ranks' signatures of a call says to the user.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "exchange/call_board.hpp"
#include "weft/calls.hpp"
#include "weft/tensor.hpp"

namespace weft {

// The field of a plan with which rows go, as one number; 0 for a plan alone.
[[nodiscard]] int64_t routed_rows_field(DType dtype, Quantise quantise, bool has_weights);

// "dtype of x = bfloat16 here and float16 on rank 2 (must be equal on all ranks)". The field as in
// CallWord::signature and DeviceWord::signature, which agree; a peer's number may be anything.
[[nodiscard]] std::string signature_text(
    Op op, size_t field, int64_t mine, int64_t theirs, size_t rank
);

}  // namespace weft
