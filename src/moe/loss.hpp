// SPDX-License-Identifier: Apache-2.0
// Cross-entropy of the next byte, in nats.
#pragma once

#include <cstddef>
#include <span>

#include "moe/matrix.hpp"

namespace weft::moe {

// Returns the sum over these tokens times `scale` and turns logits [num_tokens, kNumBytes]
// into its gradient.
double cross_entropy(Rows logits, std::span<const std::byte> targets, float scale);

}  // namespace weft::moe
