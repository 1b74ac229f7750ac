// SPDX-License-Identifier: Apache-2.0
#include "exchange/signature_text.hpp"

#include <fmt/format.h>

#include <array>
#include <span>
#include <string_view>

#include "weft/plan.hpp"

namespace weft {
namespace {

enum class Meaning : uint8_t {
  kNumber,
  kBytes,
  kYesNo,
  kLayout,
  kOverflow,
  kDtype,
  kScale,
  kQuantise,
  kRoutedRows
};

struct Field {
  std::string_view name;
  Meaning meaning = Meaning::kNumber;
};

// In the order in which the *_call.cpp and *_call_cuda.cpp files fill signatures.
std::span<const Field> fields_of(Op op) {
  static constexpr Field kPlan[] = {
      {"layout", Meaning::kLayout},
      {"pad_multiple"},
      {"expert_stride"},
      {"overflow", Meaning::kOverflow},
      {"topk"},
      {"from_map", Meaning::kYesNo},
      {"has_weights", Meaning::kYesNo},
      {"rows that go with it", Meaning::kRoutedRows},
      {"row bytes", Meaning::kBytes},
      {"scale bytes", Meaning::kBytes}};
  static constexpr Field kDispatch[] = {
      {"plan number"},
      {"dtype of x", Meaning::kDtype},
      {"row bytes of x", Meaning::kBytes},
      {"row bytes of scales", Meaning::kBytes},
      {"has_weights", Meaning::kYesNo},
      {"quantise", Meaning::kQuantise},
      {"copy_engines", Meaning::kYesNo}};
  static constexpr Field kCombine[] = {
      {"plan number"},
      {"dtype of rows", Meaning::kDtype},
      {"row bytes of rows", Meaning::kBytes},
      {"scale", Meaning::kScale},
      {"has_weights", Meaning::kYesNo},
      {"copy_engines", Meaning::kYesNo}};
  switch (op) {
    case Op::kPlan:
      return kPlan;
    case Op::kDispatch:
      return kDispatch;
    case Op::kCombine:
      break;
  }
  return kCombine;
}

// Digits of routed_rows_field().
constexpr int64_t kQuantiseUnit = 100;
constexpr int64_t kWeightsUnit = 1000;

template <size_t kCount>
std::string pick(const std::array<std::string_view, kCount>& names, int64_t value) {
  const bool is_known = value >= 0 && value < static_cast<int64_t>(kCount);
  return is_known ? std::string(names[static_cast<size_t>(value)]) : fmt::format("{}", value);
}

constexpr std::array<std::string_view, 3> kQuantiseNames = {"none", "e4m3", "e5m2"};

template <class Enum>
std::string pick(std::string_view (*name)(Enum), Enum last, int64_t value) {
  const bool is_known = value >= 0 && value <= static_cast<int64_t>(last);
  return is_known ? std::string(name(static_cast<Enum>(value))) : fmt::format("{}", value);
}

std::string dtype_text(int64_t value) {
  return pick(dtype_name, DType::kInt64, value);
}

std::string routed_rows_text(int64_t value) {
  if (value <= 0) {
    return "none";
  }
  const int64_t quantise = value / kQuantiseUnit % (kWeightsUnit / kQuantiseUnit);
  return fmt::format(
      "{}{}{}",
      dtype_text(value % kQuantiseUnit - 1),
      quantise == 0 ? "" : " as " + pick(kQuantiseNames, quantise),
      value < kWeightsUnit ? "" : " with weights"
  );
}

std::string value_text(Meaning meaning, int64_t value) {
  switch (meaning) {
    case Meaning::kNumber:
      break;
    case Meaning::kBytes:
      return value > 0 ? fmt::format("{}", value) : "none";
    case Meaning::kYesNo:
      return pick<2>({"false", "true"}, value);
    case Meaning::kLayout:
      return pick(layout_name, Layout::kExpertStrided, value);
    case Meaning::kOverflow:
      return pick<2>({"drop", "error"}, value);
    case Meaning::kDtype:
      return dtype_text(value);
    case Meaning::kScale:
      return pick<3>({"none", "plan_weights", "source_weights"}, value);
    case Meaning::kQuantise:
      return pick(kQuantiseNames, value);
    case Meaning::kRoutedRows:
      return routed_rows_text(value);
  }
  return fmt::format("{}", value);
}

}  // namespace

int64_t routed_rows_field(DType dtype, Quantise quantise, bool has_weights) {
  return 1 + static_cast<int64_t>(dtype) + kQuantiseUnit * static_cast<int64_t>(quantise) +
         (has_weights ? kWeightsUnit : 0);
}

std::string signature_text(Op op, size_t field, int64_t mine, int64_t theirs, size_t rank) {
  const std::span<const Field> fields = fields_of(op);
  const Field what = field < fields.size() ? fields[field] : Field{"a field of its word"};
  return fmt::format(
      "{} = {} here and {} on rank {} (must be equal on all ranks)",
      what.name,
      value_text(what.meaning, mine),
      value_text(what.meaning, theirs),
      rank
  );
}

}  // namespace weft
