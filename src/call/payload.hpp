// SPDX-License-Identifier: Apache-2.0
// Bytes that travel for a token: every size of a row, of its scales and of its weights. For host
// and device.
#pragma once

#include <cstdint>

#include "call/quantise.hpp"
#include "core/hd.hpp"
#include "weft/calls.hpp"

namespace weft {

// Bytes of scales of a row for which there is memory from the beginning: a byte for each 16 of up
// to 8,192 elements. Larger scales make staging grow, and go neither with the fused plan and
// dispatch nor by copy engines.
inline constexpr uint32_t kScaleRoom = 512;

// The bytes of a row of 16-bit elements, for which there is memory from the beginning.
WEFT_HD constexpr uint64_t half_row_bytes(uint64_t hidden) {
  return (2 * hidden + 15) / 16 * 16;
}

struct PayloadFormat {
  DType dtype = DType::kBFloat16;            // of rows as the source gives them
  Quantise quantise = Quantise::kNone;       // how they are stored
  ScaleRule scale_rule = ScaleRule::kExact;  // of what is quantised
  int64_t row_bytes = 0;                     // as the source gives them; 0: there are no rows
  int64_t scale_bytes = 0;                   // of a row as it is stored; 0: none
  int64_t weight_bytes = 0;                  // of all weights of a token; 0: none
  Wire wire = Wire::kNone;                   // of combine
  int64_t wire_bytes = 0;                    // of a row or sum on its way back

  bool operator==(const PayloadFormat&) const = default;
  [[nodiscard]] WEFT_HD constexpr bool is_quantised() const { return quantise != Quantise::kNone; }
  // The bytes of a row as it is stored.
  [[nodiscard]] WEFT_HD constexpr int64_t out_row_bytes() const {
    constexpr int kGivenBytes = 2;  // of an element that is to be quantised
    return is_quantised()
               ? row_bytes / (kGivenBytes * stored_format(quantise, scale_rule).elements_per_byte)
               : row_bytes;
  }
  // The bytes of a row's scales as the source gives them.
  [[nodiscard]] WEFT_HD constexpr int64_t in_scale_bytes() const {
    return is_quantised() ? 0 : scale_bytes;
  }
  // The distance from one row of scales to the next in staging.
  [[nodiscard]] WEFT_HD constexpr int64_t staged_scale_bytes() const {
    return (scale_bytes + 15) / 16 * 16;
  }
};

// The bytes of a row's scales as a dispatch stores them.
[[nodiscard]] inline int64_t stored_scale_bytes(const DispatchInput& in) {
  if (in.quantise == Quantise::kNone) {
    return in.scales.row_bytes();
  }
  const StoredFormat format = stored_format(in.quantise, in.scale_rule);
  return in.x.cols / format.group * format.scale_bytes;
}

// Returns the format of a dispatch with `topk` weights of a token.
[[nodiscard]] inline PayloadFormat payload_of(
    const DispatchInput& in, const DispatchOutput& out, int topk
) {
  return {
      .dtype = in.x.dtype,
      .quantise = in.quantise,
      .scale_rule = in.quantise == Quantise::kNone ? ScaleRule::kExact : in.scale_rule,
      .row_bytes = in.x.row_bytes(),
      .scale_bytes = out.scales.row_bytes(),
      .weight_bytes = in.weights.is_given() ? topk * int64_t{sizeof(float)} : 0};
}
// The bytes of what combine sends back for a token.
[[nodiscard]] inline int64_t returned_row_bytes(const CombineInput& in) {
  return in.wire == Wire::kNone ? in.rows.row_bytes() : wire_row_bytes(in.wire, in.rows.cols);
}
// Returns whether a combine's output is coded.
[[nodiscard]] inline bool codes_output(const CombineInput& in, const CombineOutput& out) {
  return in.wire != Wire::kNone && out.x.dtype == DType::kByte;
}
[[nodiscard]] inline PayloadFormat payload_of(const CombineInput& in, int topk) {
  return {
      .dtype = in.rows.dtype,
      .row_bytes = in.rows.row_bytes(),
      .weight_bytes = in.weights.is_given() ? topk * int64_t{sizeof(float)} : 0,
      .wire = in.wire,
      .wire_bytes = returned_row_bytes(in)};
}

}  // namespace weft
