// SPDX-License-Identifier: Apache-2.0
// The shared arithmetic evaluated for a numbered case; host and device must agree on each.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "core/half.hpp"
#include "core/hd.hpp"
#include "plan/slots.hpp"

namespace weft::testing {

struct HalfResult {
  uint32_t from_bf16 = 0;
  uint32_t from_fp16 = 0;
  uint16_t to_bf16 = 0;
  uint16_t to_fp16 = 0;
  friend bool operator==(const HalfResult&, const HalfResult&) = default;
};

// 65536 cases reach every 16-bit pattern and every sign and exponent of fp32.
inline constexpr int kNumHalfCases = 65536;

WEFT_HD constexpr HalfResult half_result(uint32_t case_idx) {
  const auto bits = static_cast<uint16_t>(case_idx);
  const uint32_t mantissa_tail = case_idx * 40503U & 0xffffU;
  const float value = std::bit_cast<float>(case_idx << 16 | mantissa_tail);
  return {
      std::bit_cast<uint32_t>(bf16_to_float(bits)),
      std::bit_cast<uint32_t>(fp16_to_float(bits)),
      float_to_bf16(value),
      float_to_fp16(value)};
}

struct SlotResult {
  int owner = 0;
  int local = 0;
  int64_t step = 0;
  int64_t limit = 0;
  int64_t kept = 0;
  int32_t slot = 0;
  friend bool operator==(const SlotResult&, const SlotResult&) = default;
};

inline constexpr int kNumSlotCases = 4096;

WEFT_HD constexpr SlotResult slot_result(uint32_t case_idx) {
  const int expert = static_cast<int>(case_idx % 64);
  const int experts_per_rank = 1 << case_idx % 7;
  const int64_t rows = case_idx / 3;
  const int64_t begin = static_cast<int64_t>(case_idx % 5) * 1000;
  const BlockRule rule{case_idx % 2 == 1, 1 + static_cast<int64_t>(case_idx % 129), 700};
  const int64_t limit = block_limit(rule, begin, 3000);
  return {
      owner_rank(expert, experts_per_rank),
      local_expert(expert, experts_per_rank),
      block_step(rule, rows),
      limit,
      rows_within(begin, rows, limit),
      slot_or_dropped(begin + rows, limit)};
}

// Each evaluates all cases on the current GPU; throws std::runtime_error with CUDA's text.
std::vector<HalfResult> half_results_cuda();
std::vector<SlotResult> slot_results_cuda();

}  // namespace weft::testing
