// SPDX-License-Identifier: Apache-2.0
#include "call/signature.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <span>
#include <string_view>
#include <utility>

#include "plan/build.hpp"

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
constexpr auto kPadding = [](int64_t value) {
  return value == kAnnouncement
             ? "none, for a call with another hidden size, number of experts or room,"
             : kNumber(value);
};
constexpr auto kBytes = [](int64_t value) { return value > 0 ? kNumber(value) : "none"; };
constexpr auto kYesNo = [](int64_t value) { return one_of<2>({"false", "true"}, value); };
constexpr auto kLayout = [](int64_t value) {
  return name_or_number(layout_name, Layout::kExpertStrided, value);
};
constexpr auto kOverflow = [](int64_t value) { return one_of<2>({"drop", "error"}, value); };
constexpr auto kOrder = [](int64_t value) {
  return name_or_number(order_name, SumOrder::kTopk, value);
};
constexpr auto kDType = [](int64_t value) {
  return value == 0 ? "none" : name_or_number(dtype_name, DType::kInt64, value - 1);
};
constexpr auto kScale = [](int64_t value) {
  return one_of<3>({"none", "plan_weights", "source_weights"}, value);
};
constexpr auto kQuantise = [](int64_t value) {
  return one_of<5>({"none", "e4m3", "e5m2", "mxfp8", "nvfp4"}, value);
};
constexpr auto kWire = [](int64_t value) { return one_of<3>({"none", "fp8", "logfmt10"}, value); };
constexpr auto kScaleRule = [](int64_t value) {
  return one_of<4>({"exact", "clamped", "power_of_two", "ue8m0"}, value);
};

struct Field {
  std::string_view name;
  size_t bits;  // of a word that it shares with its neighbours; 64: it has its own
  int64_t (*get)(const Call& call);
  std::string (*print)(int64_t value);
};

// --- what several operations have ---

constexpr auto kDTypeOf = [](const Call& c) {
  return c.payload.row_bytes == 0 ? 0 : 1 + static_cast<int64_t>(c.payload.dtype);
};
constexpr auto kQuantiseOf = [](const Call& c) { return static_cast<int64_t>(c.payload.quantise); };
constexpr auto kScaleRuleOf = [](const Call& c) {
  return static_cast<int64_t>(c.payload.scale_rule);
};
constexpr auto kHasWeights = [](const Call& c) { return int64_t{c.payload.weight_bytes > 0}; };
constexpr auto kHasCopies = [](const Call& c) { return int64_t{c.has_copies}; };
constexpr auto kIsByRoute = [](const Call& c) { return int64_t{c.is_by_route}; };
constexpr auto kCallNumber = [](const Call& c) { return c.number; };
constexpr auto kPlanNumber = [](const Call& c) { return c.plan_number; };
constexpr auto kRowBytes = [](const Call& c) { return c.payload.row_bytes; };
constexpr auto kScaleBytes = [](const Call& c) { return c.payload.scale_bytes; };
constexpr auto kTokenRoom = [](const Call& c) { return c.token_room; };

// Hash that tells placements, and costs of replicas, apart; 16 bits, 0: neither is given.
constexpr auto kPlacement = [](const Call& c) {
  uint64_t sum = 0;
  for (const int32_t expert : c.options.balance.placement) {
    sum = (sum ^ static_cast<uint32_t>(expert)) * 0x9e3779b97f4a7c15U + 1;
  }
  sum = (sum ^ static_cast<uint64_t>(c.options.balance.replica_rows)) * 0x9e3779b97f4a7c15U;
  return static_cast<int64_t>(sum >> 48U);
};

constexpr std::string_view kCall = "the caller's number of this call";
constexpr std::string_view kRoom = "memory to be made for a token";

constexpr Field kPlanFields[] = {
    {"pad_multiple", 32, [](const Call& c) { return c.options.pad_multiple; }, kPadding},
    {"layout", 2, [](const Call& c) { return static_cast<int64_t>(c.options.layout); }, kLayout},
    {"overflow",
     2,
     [](const Call& c) { return static_cast<int64_t>(c.options.overflow); },
     kOverflow},
    {"topk", 8, [](const Call& c) { return int64_t{c.topk}; }, kNumber},
    {"from_map", 2, [](const Call& c) { return int64_t{c.from_map}; }, kYesNo},
    {"order", 2, [](const Call& c) { return static_cast<int64_t>(c.options.order); }, kOrder},
    {"has_weights", 4, [](const Call& c) { return int64_t{c.has_weights}; }, kYesNo},
    {"dtype of x in the same call", 4, kDTypeOf, kDType},
    {"quantise in the same call", 4, kQuantiseOf, kQuantise},
    {"scale_rule in the same call", 4, kScaleRuleOf, kScaleRule},
    {"has_weights of x in the same call", 4, kHasWeights, kYesNo},
    {kCall, 28, kCallNumber, kNumber},
    {"expert_stride", 32, [](const Call& c) { return c.options.expert_stride; }, kNumber},
    {"replicas", 5, [](const Call& c) { return int64_t{c.options.balance.replicas}; }, kNumber},
    {"min_rows of a replica",
     32,
     [](const Call& c) { return c.options.balance.min_rows; },
     kNumber},
    {"checksum of the placement and replica_rows", 16, kPlacement, kNumber},
    {"block_rows of replicas",
     11,
     [](const Call& c) { return c.options.balance.block_rows; },
     kNumber},
    {"row bytes of x in the same call", 64, kRowBytes, kBytes},
    {"row bytes of scales in the same call", 64, kScaleBytes, kBytes},
    {"number of the imported plan", 64, kPlanNumber, kNumber}};

constexpr Field kDispatchFields[] = {
    {"plan number", 64, kPlanNumber, kNumber},
    {"dtype of x", 4, kDTypeOf, kDType},
    {"has_weights", 4, kHasWeights, kYesNo},
    {"quantise", 4, kQuantiseOf, kQuantise},
    {"scale_rule", 4, kScaleRuleOf, kScaleRule},
    {"copy_engines", 4, kHasCopies, kYesNo},
    {kCall, 28, kCallNumber, kNumber},
    {"row bytes of x", 64, kRowBytes, kBytes},
    {"row bytes of scales", 64, kScaleBytes, kBytes},
    {kRoom, 64, kTokenRoom, kBytes}};

constexpr Field kCombineFields[] = {
    {"plan number", 64, kPlanNumber, kNumber},
    {"dtype of rows", 4, kDTypeOf, kDType},
    {"has_weights", 4, kHasWeights, kYesNo},
    {"scale", 4, [](const Call& c) { return static_cast<int64_t>(c.scale); }, kScale},
    {"wire", 4, [](const Call& c) { return static_cast<int64_t>(c.payload.wire); }, kWire},
    {"copy_engines", 4, kHasCopies, kYesNo},
    {"is received later or by marks", 4, kIsByRoute, kYesNo},
    {kCall, 28, kCallNumber, kNumber},
    {"row bytes of rows", 64, kRowBytes, kBytes},
    {kRoom, 64, kTokenRoom, kBytes}};

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

constexpr size_t kWordBits = 64;

// Returns a field's value in a word that holds it from bit `shift` on.
constexpr int64_t cut(const Field& field, uint64_t word, size_t shift) {
  return static_cast<int64_t>(word >> shift & (~uint64_t{0} >> (kWordBits - field.bits)));
}

// Calls visit(field, word, shift) for each field; returns the number of words.
template <class Visit>
constexpr size_t for_each_field(Op op, const Visit& visit) {
  size_t bit = 0;
  for (const Field& field : fields_of(op)) {
    const bool fits = bit % kWordBits + field.bits <= kWordBits;
    bit = fits ? bit : (bit + kWordBits - 1) / kWordBits * kWordBits;
    visit(field, bit / kWordBits, bit % kWordBits);
    bit += field.bits;
  }
  return (bit + kWordBits - 1) / kWordBits;
}

constexpr bool fits(Op op) {
  return for_each_field(op, [](const Field&, size_t, size_t) {}) <= kSignatureWords;
}
static_assert(fits(Op::kPlan) && fits(Op::kDispatch) && fits(Op::kCombine));

// Packs fields at places known when compiling: every call on a GPU packs some.
template <Op kOp, size_t... kIndex>
Signature pack(const Call& call, std::index_sequence<kIndex...> /*fields*/) {
  constexpr auto kPlaces = [] {
    std::array<std::pair<size_t, size_t>, sizeof...(kIndex)> places;
    size_t next = 0;
    for_each_field(kOp, [&](const Field&, size_t word, size_t shift) {
      places[next++] = {word, shift};
    });
    return places;
  }();
  uint64_t words[kSignatureWords] = {};
  const auto put = [&](const Field& field, std::pair<size_t, size_t> place) {
    const auto value = static_cast<uint64_t>(field.get(call));
    words[place.first] |= static_cast<uint64_t>(cut(field, value, 0)) << place.second;
  };
  (put(fields_of(kOp)[kIndex], kPlaces[kIndex]), ...);
  return std::bit_cast<Signature>(words);
}

template <Op kOp>
Signature pack(const Call& call) {
  return pack<kOp>(call, std::make_index_sequence<fields_of(kOp).size()>());
}

}  // namespace

Refusal::Refusal(const std::exception& reason) : Refusal(reason.what()) {
  is_for_room = dynamic_cast<const NoRoom*>(&reason) != nullptr ? 1 : 0;
}

Signature signature_of(const Call& call) {
  switch (call.op) {
    case Op::kPlan:
      return pack<Op::kPlan>(call);
    case Op::kDispatch:
      return pack<Op::kDispatch>(call);
    case Op::kCombine:
      return pack<Op::kCombine>(call);
    default:
      return {};
  }
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
    const auto value = [&](int64_t bits) { return cut(field, static_cast<uint64_t>(bits), shift); };
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
