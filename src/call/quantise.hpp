// SPDX-License-Identifier: Apache-2.0
// The rule by which dispatch makes FP8 of bf16 rows, for host and device: a group's scale is its
// largest magnitude divided by the largest FP8 number, 1 for a group of zeros; an element is
// divided by it and rounded to nearest even.
#pragma once

#include "core/hd.hpp"
#include "weft/calls.hpp"

namespace weft {

WEFT_HD constexpr float largest_fp8(Quantise kind) {
  return kind == Quantise::kE4M3 ? 448.0F : 57344.0F;
}

WEFT_HD constexpr float scale_of(float largest, Quantise kind) {
  return largest == 0.0F ? 1.0F : largest / largest_fp8(kind);
}

}  // namespace weft
