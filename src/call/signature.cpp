// SPDX-License-Identifier: Apache-2.0
#include "call/signature.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <string_view>

namespace weft {
namespace {

template <class Enum>
std::string name_or_number(std::string_view (*name)(Enum), Enum last, int64_t value) {
  const bool is_known = value >= 0 && value <= static_cast<int64_t>(last);
  return is_known ? std::string(name(static_cast<Enum>(value))) : fmt::format("{}", value);
}

template <size_t kCount>
std::string one_of(const std::array<std::string_view, kCount>& names, int64_t value) {
  const bool is_known = value >= 0 && value < static_cast<int64_t>(kCount);
  return is_known ? std::string(names[static_cast<size_t>(value)]) : fmt::format("{}", value);
}

// --- how a value is printed ---

constexpr auto kNumber = [](int64_t value) { return fmt::format("{}", value); };
constexpr auto kBytes = [](int64_t value) { return value > 0 ? kNumber(value) : "none"; };
constexpr auto kYesNo = [](int64_t value) { return one_of<2>({"false", "true"}, value); };
constexpr auto kLayout = [](int64_t value) {
  return name_or_number(layout_name, Layout::kExpertStrided, value);
};
constexpr auto kOverflow = [](int64_t value) { return one_of<2>({"drop", "error"}, value); };
constexpr auto kDType = [](int64_t value) {
  return value == 0 ? "none" : name_or_number(dtype_name, DType::kInt64, value - 1);
};
constexpr auto kScale = [](int64_t value) {
  return one_of<3>({"none", "plan_weights", "source_weights"}, value);
};
constexpr auto kQuantise = [](int64_t value) { return one_of<3>({"none", "e4m3", "e5m2"}, value); };

struct Field {
  std::string_view name;
  bool is_byte;  // of a word that it shares with its neighbours, else it has its own
  int64_t (*get)(const Call& call);
  std::string (*print)(int64_t value);
};

// --- what several operations have ---

constexpr auto kDTypeOf = [](const Call& c) {
  return c.payload.row_bytes == 0 ? 0 : 1 + static_cast<int64_t>(c.payload.dtype);
};
constexpr auto kQuantiseOf = [](const Call& c) { return static_cast<int64_t>(c.payload.quantise); };
constexpr auto kHasWeights = [](const Call& c) { return int64_t{c.payload.weight_bytes > 0}; };
constexpr auto kHasCopies = [](const Call& c) { return int64_t{c.has_copies}; };
constexpr auto kPlanNumber = [](const Call& c) { return c.plan_number; };
constexpr auto kRowBytes = [](const Call& c) { return c.payload.row_bytes; };
constexpr auto kScaleBytes = [](const Call& c) { return c.payload.scale_bytes; };
constexpr auto kTokenRoom = [](const Call& c) { return c.token_room; };

constexpr std::string_view kRoom = "memory to be made for a token";

constexpr Field kPlanFields[] = {
    {"layout", true, [](const Call& c) { return static_cast<int64_t>(c.options.layout); }, kLayout},
    {"overflow",
     true,
     [](const Call& c) { return static_cast<int64_t>(c.options.overflow); },
     kOverflow},
    {"topk", true, [](const Call& c) { return int64_t{c.topk}; }, kNumber},
    {"from_map", true, [](const Call& c) { return int64_t{c.from_map}; }, kYesNo},
    {"has_weights", true, [](const Call& c) { return int64_t{c.has_weights}; }, kYesNo},
    {"dtype of x in the same call", true, kDTypeOf, kDType},
    {"quantise in the same call", true, kQuantiseOf, kQuantise},
    {"has_weights of x in the same call", true, kHasWeights, kYesNo},
    {"pad_multiple", false, [](const Call& c) { return c.options.pad_multiple; }, kNumber},
    {"expert_stride", false, [](const Call& c) { return c.options.expert_stride; }, kNumber},
    {"row bytes of x in the same call", false, kRowBytes, kBytes},
    {"row bytes of scales in the same call", false, kScaleBytes, kBytes},
    {"number of the imported plan", false, kPlanNumber, kNumber}};

constexpr Field kDispatchFields[] = {
    {"plan number", false, kPlanNumber, kNumber},
    {"dtype of x", true, kDTypeOf, kDType},
    {"has_weights", true, kHasWeights, kYesNo},
    {"quantise", true, kQuantiseOf, kQuantise},
    {"copy_engines", true, kHasCopies, kYesNo},
    {"row bytes of x", false, kRowBytes, kBytes},
    {"row bytes of scales", false, kScaleBytes, kBytes},
    {kRoom, false, kTokenRoom, kBytes}};

constexpr Field kCombineFields[] = {
    {"plan number", false, kPlanNumber, kNumber},
    {"dtype of rows", true, kDTypeOf, kDType},
    {"has_weights", true, kHasWeights, kYesNo},
    {"scale", true, [](const Call& c) { return static_cast<int64_t>(c.scale); }, kScale},
    {"copy_engines", true, kHasCopies, kYesNo},
    {"row bytes of rows", false, kRowBytes, kBytes},
    {kRoom, false, kTokenRoom, kBytes}};

constexpr std::span<const Field> fields_of(Op op) {
  switch (op) {
    case Op::kPlan:
      return kPlanFields;
    case Op::kDispatch:
      return kDispatchFields;
    case Op::kCombine:
      return kCombineFields;
    default:
      return {};
  }
}

// visit(field, word, shift) for each field where it lies. -> words that there are.
template <class Visit>
constexpr size_t for_each_field(Op op, const Visit& visit) {
  constexpr size_t kBits = 64;
  size_t bit = 0;
  for (const Field& field : fields_of(op)) {
    bit = field.is_byte ? bit : (bit + kBits - 1) / kBits * kBits;
    visit(field, bit / kBits, bit % kBits);
    bit += field.is_byte ? 8 : kBits;
  }
  return (bit + kBits - 1) / kBits;
}

constexpr bool fits(Op op) {
  return for_each_field(op, [](const Field&, size_t, size_t) {}) <= kSignatureWords;
}
static_assert(fits(Op::kPlan) && fits(Op::kDispatch) && fits(Op::kCombine));

}  // namespace

Signature signature_of(const Call& call) {
  uint64_t words[kSignatureWords] = {};
  for_each_field(call.op, [&](const Field& field, size_t word, size_t shift) {
    words[word] |= static_cast<uint64_t>(field.get(call)) << shift;
  });
  Signature signature;
  for (size_t word = 0; word < kSignatureWords; ++word) {
    signature.words[word] = static_cast<int64_t>(words[word]);
  }
  return signature;
}

std::optional<bool> has_dispatch(const Signature& plan) {
  std::optional<bool> has_rows;
  if (std::ranges::any_of(plan.words, [](int64_t word) { return word != 0; })) {
    for_each_field(Op::kPlan, [&](const Field& field, size_t word, size_t /*shift*/) {
      if (field.get == kRowBytes) {
        has_rows = plan.words[word] > 0;
      }
    });
  }
  return has_rows;
}

std::string difference_text(Op op, size_t word, int64_t mine, int64_t theirs, size_t rank) {
  std::string text;
  const auto tell = [&](std::string_view name, const std::string& own, const std::string& other) {
    text = fmt::format(
        "{} = {} here and {} on rank {} (must be equal on all ranks)", name, own, other, rank
    );
  };
  for_each_field(op, [&](const Field& field, size_t at, size_t shift) {
    const auto value = [&](int64_t bits) {
      return field.is_byte ? static_cast<int64_t>(static_cast<uint64_t>(bits) >> shift & 0xff)
                           : bits;
    };
    if (text.empty() && at == word && value(mine) != value(theirs)) {
      tell(field.name, field.print(value(mine)), field.print(value(theirs)));
    }
  });
  if (text.empty()) {
    tell("a field without a name", kNumber(mine), kNumber(theirs));
  }
  return text;
}

}  // namespace weft
