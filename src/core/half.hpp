// SPDX-License-Identifier: Apache-2.0
// bf16 and fp16 <-> fp32, round to nearest even, only by integer arithmetic: the same bits on
// every machine. A NaN becomes the quiet NaN of its sign.
#pragma once

#include <bit>
#include <cstdint>

#include "core/hd.hpp"

namespace weft {

WEFT_HD constexpr float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

WEFT_HD constexpr uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return static_cast<uint16_t>((bits >> 16 & 0x8000U) | 0x7fc0U);
  }
  return static_cast<uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

WEFT_HD constexpr float fp16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
  const uint32_t magnitude = bits & 0x7fffU;
  if (magnitude >= 0x7c00U) {  // infinity or NaN
    const uint32_t mantissa = (magnitude & 0x3ffU) != 0 ? 0x400000U : 0U;
    return std::bit_cast<float>(sign | 0x7f800000U | mantissa);
  }
  // Scaling by 2^112 re-biases the exponent and normalises subnormals exactly.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
}

WEFT_HD constexpr uint16_t float_to_fp16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude >= 0x47800000U) {  // at least 65536
    return static_cast<uint16_t>(sign | (magnitude > 0x7f800000U ? 0x7e00U : 0x7c00U));
  }
  if (magnitude <
      0x38800000U) {  // below the smallest normal fp16: the addition of 0.5 does the rounding
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000U));
  }
  const uint32_t rounded = magnitude - 0x38000000U + 0xfffU + (magnitude >> 13 & 1U);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

}  // namespace weft
