// SPDX-License-Identifier: Apache-2.0
#include "support/compare.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/half.hpp"
#include "plan/plan_data.hpp"

namespace weft::test {
namespace {

std::string element_text(DType dtype, const std::byte* at) {
  uint64_t bits = 0;
  std::memcpy(&bits, at, static_cast<size_t>(dtype_bytes(dtype)));
  const auto half = static_cast<uint16_t>(bits);
  switch (dtype) {
    case DType::kBFloat16:
      return fmt::format("{} ({:#x})", bf16_to_float(half), bits);
    case DType::kFloat16:
      return fmt::format("{} ({:#x})", fp16_to_float(half), bits);
    case DType::kFloat32:
      return fmt::format("{} ({:#x})", std::bit_cast<float>(static_cast<uint32_t>(bits)), bits);
    default:
      return fmt::format("{:#x}", bits);
  }
}

bool is_nan(DType dtype, const std::byte* at) {
  uint32_t bits = 0;
  std::memcpy(&bits, at, static_cast<size_t>(dtype_bytes(dtype)));
  switch (dtype) {
    case DType::kBFloat16:
      return std::isnan(bf16_to_float(static_cast<uint16_t>(bits)));
    case DType::kFloat16:
      return std::isnan(fp16_to_float(static_cast<uint16_t>(bits)));
    case DType::kFloat32:
      return std::isnan(std::bit_cast<float>(bits));
    default:
      return false;
  }
}

template <class T>
std::string differing(std::string_view name, const T& actual, const T& expected) {
  if (actual == expected) {
    return {};
  }
  return fmt::format("plan: {} is {}, expected {}", name, actual, expected);
}

template <class Items>
std::string differing_items(std::string_view name, const Items& actual, const Items& expected) {
  if (actual.size() != expected.size()) {
    return fmt::format("plan: {} has {} items, expected {}", name, actual.size(), expected.size());
  }
  const auto [mine, theirs] = std::mismatch(actual.begin(), actual.end(), expected.begin());
  if (mine == actual.end()) {
    return {};
  }
  return fmt::format(
      "plan: {}[{}] is {}, expected {}", name, mine - actual.begin(), *mine, *theirs
  );
}

std::string differing_arrivals(
    std::string_view name,
    const std::vector<Arrivals>& actual,
    const std::vector<Arrivals>& expected
) {
  for (size_t rank = 0; rank < std::min(actual.size(), expected.size()); ++rank) {
    const Arrivals& a = actual[rank];
    const Arrivals& b = expected[rank];
    if (a == b) {
      continue;
    }
    for (const std::string& text :
         {differing_items(fmt::format("{}[{}].token", name, rank), a.token, b.token),
          differing_items(fmt::format("{}[{}].slot", name, rank), a.slot, b.slot),
          differing_items(fmt::format("{}[{}].k", name, rank), a.k, b.k),
          differing_items(fmt::format("{}[{}].weight", name, rank), a.weight, b.weight)}) {
      if (!text.empty()) {
        return text;
      }
    }
    return fmt::format("plan: {}[{}] differs", name, rank);
  }
  return differing(fmt::format("{}.size", name), actual.size(), expected.size());
}

}  // namespace

std::string first_difference(
    std::string_view what, const ConstTensor& actual, const ConstTensor& expected
) {
  if (actual.rows != expected.rows || actual.cols != expected.cols) {
    return fmt::format(
        "{}: shape [{}, {}], expected [{}, {}]",
        what,
        actual.rows,
        actual.cols,
        expected.rows,
        expected.cols
    );
  }
  const std::byte* end = actual.data + actual.num_bytes();
  const std::byte* at = std::mismatch(actual.data, end, expected.data).first;
  if (at == end) {
    return {};
  }
  const int64_t width = dtype_bytes(actual.dtype);
  const int64_t element = (at - actual.data) / width;
  return fmt::format(
      "{}: row {}, element {} is {}, expected {}",
      what,
      element / actual.cols,
      element % actual.cols,
      element_text(actual.dtype, actual.data + element * width),
      element_text(actual.dtype, expected.data + element * width)
  );
}

std::string first_difference_but_nan(
    std::string_view what, const ConstTensor& actual, const ConstTensor& expected
) {
  if (actual.rows != expected.rows || actual.cols != expected.cols) {
    return first_difference(what, actual, expected);
  }
  std::vector<std::byte> bytes(actual.data, actual.data + actual.num_bytes());
  const int64_t width = dtype_bytes(actual.dtype);
  for (int64_t at = 0; at < actual.num_bytes(); at += width) {
    if (is_nan(actual.dtype, actual.data + at) && is_nan(actual.dtype, expected.data + at)) {
      std::copy_n(expected.data + at, width, bytes.data() + at);
    }
  }
  ConstTensor same = actual;
  same.data = bytes.data();
  return first_difference(what, same, expected);
}

std::string first_difference(const Plan& actual, const Plan& expected) {
  if (actual == expected) {
    return {};
  }
  const PlanData& a = contents_of(actual);
  const PlanData& b = contents_of(expected);
  for (const std::string& text :
       {differing("num_rows", a.num_rows, b.num_rows),
        differing("required_rows", a.required_rows, b.required_rows),
        differing("overflow", a.overflow, b.overflow),
        differing("expert_stride", a.shape.options.expert_stride, b.shape.options.expert_stride),
        differing("has_weights", a.shape.has_weights, b.shape.has_weights),
        differing_items("rows_per_expert", a.rows_per_expert, b.rows_per_expert),
        differing_items("expert_begin", a.expert_begin, b.expert_begin),
        differing_items("row_experts", a.row_experts, b.row_experts),
        differing_items("global_routes", a.global_routes, b.global_routes),
        differing_items("route_slot", a.route_slot, b.route_slot),
        differing_items("padding", a.padding, b.padding),
        differing_arrivals("sent", a.sent, b.sent),
        differing_arrivals("received", a.received, b.received)}) {
    if (!text.empty()) {
      return text;
    }
  }
  return "plan: differs from the reference in another field";
}

}  // namespace weft::test
