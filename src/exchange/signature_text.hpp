// SPDX-License-Identifier: Apache-2.0
// What a difference between two ranks' signatures of a call says to the user.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "exchange/call_board.hpp"

namespace weft {

// "dtype of x = bfloat16 here and float16 on rank 2 (must be equal on all ranks)". The field as in
// CallWord::signature and DeviceWord::signature, which agree; a peer's number may be anything.
[[nodiscard]] std::string signature_text(
    Op op, size_t field, int64_t mine, int64_t theirs, size_t rank
);

}  // namespace weft
