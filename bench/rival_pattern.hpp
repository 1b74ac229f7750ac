// SPDX-License-Identifier: Apache-2.0
// Contents of rows that host and GPU know without telling each other.
#pragma once

#include <cstdint>

#include "core/half.hpp"
#include "core/hd.hpp"

namespace weft::bench {

// bf16 bits of one element: a multiple of 1/16 in [-8, 8), told apart by all three numbers.
WEFT_HD constexpr uint16_t pattern(uint32_t seed, uint32_t row, uint32_t column) {
  uint32_t bits = seed * 0x9e3779b9U ^ (row + 1) * 0x85ebca6bU ^ (column + 1) * 0xc2b2ae35U;
  bits = (bits ^ bits >> 16) * 0x7feb352dU;
  bits = (bits ^ bits >> 15) * 0x846ca68bU;
  bits ^= bits >> 16;
  return float_to_bf16((static_cast<float>(bits & 255U) - 128.0F) / 16.0F);
}

}  // namespace weft::bench
