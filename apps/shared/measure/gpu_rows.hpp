// SPDX-License-Identifier: Apache-2.0
// Rows whose every element follows from where it stands, so that a GPU can fill them and the host
// can check a sample without holding them.
#pragma once

#include <cstdint>

#include "core/half.hpp"
#include "core/hd.hpp"

namespace weft::program {

// A small number with few bits, so that sums differ if a term is missing: -4 to 3.97.
WEFT_HD constexpr float row_element(uint64_t seed, int64_t row, int64_t col) {
  uint64_t bits = seed ^ (static_cast<uint64_t>(row) << 20U) ^ static_cast<uint64_t>(col);
  bits *= 0x9e3779b97f4a7c15U;
  bits ^= bits >> 29U;
  bits *= 0xbf58476d1ce4e5b9U;
  return static_cast<float>(static_cast<int>(bits >> 56U) - 128) / 32.0F;
}

}  // namespace weft::program
