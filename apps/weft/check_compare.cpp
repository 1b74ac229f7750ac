// SPDX-License-Identifier: Apache-2.0
#include "check_compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "core/half.hpp"

namespace weft::program {
namespace {

// Value and bits: two numbers that print alike may still differ.
std::string element_text(DType dtype, const std::byte* place) {
  uint32_t bits = 0;
  std::memcpy(&bits, place, static_cast<size_t>(std::min<int64_t>(dtype_bytes(dtype), 4)));
  const auto half = static_cast<uint16_t>(bits & 0xffffU);
  switch (dtype) {
    case DType::kBFloat16:
      return fmt::format("{} (0x{:04x})", bf16_to_float(half), bits);
    case DType::kFloat16:
      return fmt::format("{} (0x{:04x})", fp16_to_float(half), bits);
    case DType::kFloat32:
      return fmt::format("{} (0x{:08x})", std::bit_cast<float>(bits), bits);
    default:
      return fmt::format("0x{:02x}", bits);
  }
}

}  // namespace

std::string slot_text(const PlanData& plan, int64_t slot) {
  for (size_t rank = 0; rank < plan.received.size(); ++rank) {
    const Arrivals& arrivals = plan.received[rank];
    for (size_t i = 0; i < arrivals.token.size(); ++i) {
      const auto begin = static_cast<size_t>(arrivals.route_begin[i]);
      const auto end = static_cast<size_t>(arrivals.route_begin[i + 1]);
      for (size_t j = begin; j < end; ++j) {
        if (arrivals.slot[j] == slot) {
          return fmt::format(
              "slot {} (rank {}, token {}, k {})", slot, rank, arrivals.token[i], arrivals.k[j]
          );
        }
      }
    }
  }
  const bool is_padding =
      std::any_of(plan.padding.begin(), plan.padding.end(), [&](const auto& range) {
        return range.first <= slot && slot < range.second;
      });
  return fmt::format("slot {} ({})", slot, is_padding ? "padding" : "slack");
}

std::optional<std::string> first_difference(
    std::string_view what,
    const ConstTensor& actual,
    const ConstTensor& expected,
    const std::function<std::string(int64_t)>& row_text
) {
  if (actual.rows != expected.rows || actual.cols != expected.cols) {
    return fmt::format(
        "{}: [{}, {}] (expected [{}, {}])",
        what,
        actual.rows,
        actual.cols,
        expected.rows,
        expected.cols
    );
  }
  const auto* differing =
      std::mismatch(actual.data, actual.data + actual.num_bytes(), expected.data).first;
  if (differing == actual.data + actual.num_bytes()) {
    return std::nullopt;
  }
  const int64_t width = dtype_bytes(actual.dtype);
  const int64_t index = (differing - actual.data) / width;
  return fmt::format(
      "{}: {}, element {}: {}, expected {}",
      what,
      row_text(index / actual.cols),
      index % actual.cols,
      element_text(actual.dtype, actual.data + index * width),
      element_text(actual.dtype, expected.data + index * width)
  );
}

}  // namespace weft::program
