// SPDX-License-Identifier: Apache-2.0
// Codes a sum on its way to its token's rank (Wire of weft/calls.hpp), in integers and in fp32
// operations that round alike everywhere: the same bits on every machine. For host and device, a
// number at a time; docs/wire.md has the layout and the bounds of errors.
//
// A coded row has, one behind the other: a byte for each element; with kLogFmt10 two more bits for
// each, four elements to a byte, the first in the lowest bits; and the head of each group of
// kQuantiseGroup elements, four bytes.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "call/quantise.hpp"
#include "core/fp8.hpp"
#include "core/hd.hpp"
#include "weft/calls.hpp"

namespace weft {

inline constexpr uint32_t kMagnitude = 0x7fffffffU;  // of an fp32
inline constexpr uint32_t kInfinity = 0x7f800000U;
inline constexpr uint32_t kQuietNan = 0x7fc00000U;

// Returns the byte of a coded row at which the heads of its groups begin.
WEFT_HD constexpr int64_t wire_heads(Wire wire, int64_t hidden) {
  return wire == Wire::kFp8 ? hidden : hidden + hidden / 4;
}

// --- kFp8: the head is the scale ---

// Returns a group's scale; `largest`: the bits of its largest magnitude. The scale is normal, so as
// exact as fp32 can be; an infinity or a NaN in the group makes it and all elements NaNs.
WEFT_HD constexpr float wire_scale(uint32_t largest) {
  constexpr float kLeast = 0x1p-126F;
  if (largest >= kInfinity) {
    return std::bit_cast<float>(kQuietNan);
  }
  const float scale = std::bit_cast<float>(largest) / largest_fp8(Quantise::kE4M3);
  return largest == 0 ? 1.0F : scale < kLeast ? kLeast : scale;
}

// --- kLogFmt10: the bits of a magnitude, as an integer, are its logarithm ---

// Codes 1 to kLogCodes stand for the logarithms least, least + step, ...; 0 is zero.
inline constexpr uint32_t kLogCodes = 511;
inline constexpr uint32_t kLogSign = 1U << 9;
// The range of logarithms that a group may have, 32 powers of two: what is less counts as zero.
inline constexpr uint32_t kLogRange = 32U << 23;
inline constexpr uint32_t kLogStepUnit = 16;

// The head has the upper half of the bits of `least` in its lower half, and step / kLogStepUnit in
// its upper half.
struct LogGroup {
  uint32_t least;
  uint32_t step;
  WEFT_HD constexpr LogGroup(uint32_t head)  // NOLINT: the same thing
      : least(head << 16), step((head >> 16) * kLogStepUnit) {}
};
inline constexpr uint32_t kLogNan = 0xffff0000U;  // `least` of a group with an infinity or a NaN

// Returns a group's head, by the bits of its non-zero magnitudes. Of a group of zeros: any, 0.
WEFT_HD constexpr uint32_t log_head(uint32_t least, uint32_t largest) {
  constexpr uint32_t kUpper = 0xffff0000U;
  if (largest >= kInfinity) {
    return kLogNan >> 16 | 1U << 16;
  }
  const uint32_t floor = largest > kLogRange ? largest - kLogRange : 0;
  const uint32_t first = (least < floor ? floor : least) & kUpper;
  const uint32_t range = largest > first ? largest - first : 0;
  constexpr uint32_t kUnits = (kLogCodes - 1) * kLogStepUnit;
  const uint32_t units = (range + kUnits - 1) / kUnits;
  return (largest == 0 ? 0 : first >> 16) | (units == 0 ? 1 : units) << 16;
}

// Returns number / by, rounded down; `by` is at least kLogStepUnit. A CPU's vectors divide no
// integers; a double holds both exactly, and no quotient is so near to a whole number that it would
// be rounded to one.
WEFT_HD constexpr uint32_t divided(uint32_t number, uint32_t by) {
#ifdef __CUDA_ARCH__
  return number / by;
#else
  return static_cast<uint32_t>(static_cast<int32_t>(static_cast<double>(number) / by));
#endif
}

// Codes the bits of an fp32 in ten: the sign, and the code of the nearest logarithm.
WEFT_HD constexpr uint32_t log_code(uint32_t bits, LogGroup group) {
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t sign = bits >> 31 << 9;
  const bool is_zero = magnitude == 0 || magnitude < group.least;
  const uint32_t steps = divided(magnitude - group.least + group.step / 2, group.step);
  return sign | (is_zero ? 0 : 1 + steps);
}

// Returns the bits of the fp32 of a `code`.
WEFT_HD constexpr uint32_t log_bits(uint32_t code, LogGroup group) {
  constexpr uint32_t kLargest = kInfinity - 1;
  const uint32_t number = code & kLogCodes;
  const uint32_t logarithm = group.least + (number - 1) * group.step;
  const uint32_t magnitude = logarithm > kLargest ? kLargest : logarithm;
  const uint32_t bits = code >> 9 << 31 | (number == 0 ? 0 : magnitude);
  return group.least == kLogNan ? kQuietNan : bits;
}

// --- a group on a host, in plain loops: cpu/combine/coded_sum.cpp compiles them for vectors ---

// Writes group `group` of a coded row of `hidden` elements.
[[gnu::always_inline]] inline void code_group(
    Wire wire, const float* values, std::byte* row, int64_t hidden, int64_t group
) {
  uint32_t largest = 0;
  uint32_t least = ~0U;
  for (int i = 0; i < kQuantiseGroup; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(values[i]) & kMagnitude;
    largest = std::max(largest, magnitude);
    least = std::min(least, magnitude - 1);  // zero is no least
  }
  std::byte* const codes = row + group * kQuantiseGroup;
  uint32_t head = 0;
  if (wire == Wire::kFp8) {
    const float scale = wire_scale(largest);
    head = std::bit_cast<uint32_t>(scale);
    for (int i = 0; i < kQuantiseGroup; ++i) {
      codes[i] = std::byte{float_to_fp8(values[i] / scale, kFp8E4M3)};
    }
  } else {
    std::byte* const upper = row + hidden + group * (kQuantiseGroup / 4);
    head = log_head(least + 1, largest);
    uint32_t ten[kQuantiseGroup];
    for (int i = 0; i < kQuantiseGroup; ++i) {
      ten[i] = log_code(std::bit_cast<uint32_t>(values[i]), head);
      codes[i] = static_cast<std::byte>(ten[i]);
    }
    for (int i = 0; i < kQuantiseGroup; i += 4) {
      upper[i / 4] = static_cast<std::byte>(
          ten[i] >> 8 | ten[i + 1] >> 8 << 2 | ten[i + 2] >> 8 << 4 | ten[i + 3] >> 8 << 6
      );
    }
  }
  std::memcpy(row + wire_heads(wire, hidden) + group * int64_t{sizeof head}, &head, sizeof head);
}

// Reads a group that code_group() wrote.
[[gnu::always_inline]] inline void read_group(
    Wire wire, const std::byte* row, int64_t hidden, int64_t group, float* values
) {
  uint32_t head = 0;
  std::memcpy(&head, row + wire_heads(wire, hidden) + group * int64_t{sizeof head}, sizeof head);
  const auto* const codes = reinterpret_cast<const uint8_t*>(row + group * kQuantiseGroup);
  if (wire == Wire::kFp8) {
    for (int i = 0; i < kQuantiseGroup; ++i) {
      values[i] = fp8_to_float(codes[i], kFp8E4M3) * std::bit_cast<float>(head);
    }
    return;
  }
  const auto* const upper =
      reinterpret_cast<const uint8_t*>(row + hidden + group * (kQuantiseGroup / 4));
  uint32_t twos[kQuantiseGroup];
  for (int i = 0; i < kQuantiseGroup; i += 4) {
    twos[i] = upper[i / 4] & 3U;
    twos[i + 1] = upper[i / 4] >> 2 & 3U;
    twos[i + 2] = upper[i / 4] >> 4 & 3U;
    twos[i + 3] = upper[i / 4] >> 6;
  }
  for (int i = 0; i < kQuantiseGroup; ++i) {
    values[i] = std::bit_cast<float>(log_bits(twos[i] << 8 | codes[i], head));
  }
}

}  // namespace weft
