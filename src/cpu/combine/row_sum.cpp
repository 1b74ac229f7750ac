// SPDX-License-Identifier: Apache-2.0
#include "cpu/combine/row_sum.hpp"

#include "core/half.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/combine/row_sum.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // compiles this file once per vector target
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace weft::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;
using VecF = hn::Vec<F32>;
using VecU = hn::Vec<U32>;

// Each format loads and stores two vectors' worth of adjacent elements at once, in lanes of its
// choice. The results are those of core/half.hpp, bit for bit.
struct Pair {
  VecF a;
  VecF b;
};

struct Fp32 {
  using Element = float;
  static Pair rounded(Pair value) { return value; }
  static Pair load(const Element* from) {
    return {hn::LoadU(F32(), from), hn::LoadU(F32(), from + hn::Lanes(F32()))};
  }
  static void store(Pair value, Element* to) {
    hn::StoreU(value.a, F32(), to);
    hn::StoreU(value.b, F32(), to + hn::Lanes(F32()));
  }
  static float load_one(Element from) { return from; }
  static Element round_one(float value) { return value; }
};

// bf16 is the upper half of an fp32: even elements are shifted up, odd ones masked.
struct Bf16 {
  using Element = uint16_t;
  static constexpr uint32_t kOddMask = 0xffff0000U;
  static Pair load(const Element* from) {
    const VecU both = hn::LoadU(U32(), reinterpret_cast<const uint32_t*>(from));
    return {
        hn::BitCast(F32(), hn::ShiftLeft<16>(both)),
        hn::BitCast(F32(), hn::And(both, hn::Set(U32(), kOddMask)))};
  }
  // Returns the rounded value in the upper half, noise below.
  static VecU round(VecF value) {
    const U32 du;
    const VecU bits = hn::BitCast(du, value);
    const VecU is_odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const VecU rounded = hn::Add(bits, hn::Add(is_odd, hn::Set(du, 0x7fff)));
    const VecU nan = hn::Or(hn::And(bits, hn::Set(du, 0x80000000U)), hn::Set(du, 0x7fc00000U));
    return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), nan, rounded);
  }
  static Pair rounded(Pair value) {
    const VecU mask = hn::Set(U32(), kOddMask);
    return {
        hn::BitCast(F32(), hn::And(round(value.a), mask)),
        hn::BitCast(F32(), hn::And(round(value.b), mask))};
  }
  static void store(Pair value, Element* to) {
    const VecU odd = hn::And(round(value.b), hn::Set(U32(), kOddMask));
    const VecU both = hn::Or(hn::ShiftRight<16>(round(value.a)), odd);
    hn::StoreU(both, U32(), reinterpret_cast<uint32_t*>(to));
  }
  static float load_one(Element from) { return bf16_to_float(from); }
  static Element round_one(float value) { return float_to_bf16(value); }
};

struct Fp16 {
  using Element = uint16_t;
  static Pair rounded(Pair value) {
    HWY_ALIGN Element stored[2 * hn::MaxLanes(F32())];
    store(value, stored);
    return load(stored);
  }
  static Pair load(const Element* from) {
    return {load_half(from), load_half(from + hn::Lanes(F32()))};
  }
  static void store(Pair value, Element* to) {
    store_half(value.a, to);
    store_half(value.b, to + hn::Lanes(F32()));
  }
  static float load_one(Element from) { return fp16_to_float(from); }
  static Element round_one(float value) { return float_to_fp16(value); }

#if HWY_TARGET <= HWY_AVX2 || HWY_ARCH_ARM_A64
  // The machine's conversions keep a NaN's payload, so vectors with NaNs go one by one.
  static VecF load_half(const Element* from) {
    const hn::Rebind<hwy::float16_t, F32> half;
    return hn::PromoteTo(F32(), hn::BitCast(half, hn::LoadU(U16(), from)));
  }
  static void store_half(VecF value, Element* to) {
    const hn::Rebind<hwy::float16_t, F32> half;
    if (HWY_LIKELY(hn::AllFalse(F32(), hn::IsNaN(value)))) {
      hn::StoreU(hn::BitCast(U16(), hn::DemoteTo(half, value)), U16(), to);
    } else {
      store_each(value, to);
    }
  }
#else
  static VecF load_half(const Element* from) {
    HWY_ALIGN float lanes[hn::MaxLanes(F32())];
    for (size_t i = 0; i < hn::Lanes(F32()); ++i) {
      lanes[i] = fp16_to_float(from[i]);
    }
    return hn::Load(F32(), lanes);
  }
  static void store_half(VecF value, Element* to) {
    store_each(value, to);
  }
#endif
  static void store_each(VecF value, Element* to) {
    HWY_ALIGN float lanes[hn::MaxLanes(F32())];
    hn::Store(value, F32(), lanes);
    for (size_t i = 0; i < hn::Lanes(F32()); ++i) {
      to[i] = float_to_fp16(lanes[i]);
    }
  }
};

template <class Format, bool kIsWeighted>
class Summer {
 public:
  using Element = typename Format::Element;
  Summer(const RowGroups& terms, std::span<const std::byte* const> next)
      : terms_(terms), next_(next) {}

  // Loops over columns, then rows: each element is read once and loads of several rows are in
  // flight.
  void sum(std::byte* out_bytes, size_t num_cols) const {
    const size_t block = 2 * hn::Lanes(F32());  // elements of a pair
    auto* const out = reinterpret_cast<Element*>(out_bytes);
    size_t col = 0;
    for (; col + block <= num_cols; col += block) {
      for (const std::byte* soon : next_) {
        for (size_t line = 0; line < block * sizeof(Element); line += 64) {
          hwy::Prefetch(soon + col * sizeof(Element) + line);
        }
      }
      Format::store(sum_pair(col), out + col);
    }
    for (; col < num_cols; ++col) {
      out[col] = Format::round_one(sum_one(col));
    }
  }

 private:
  [[nodiscard]] const Element* row(size_t i) const {
    return reinterpret_cast<const Element*>(terms_.rows[i]);
  }

  [[nodiscard]] Pair term(size_t i, size_t col) const {
    Pair value = Format::load(row(i) + col);
    if constexpr (kIsWeighted) {
      const VecF weight = hn::Set(F32(), terms_.weights[i]);
      value = {hn::Mul(value.a, weight), hn::Mul(value.b, weight)};
    }
    return value;
  }

  static Pair add(Pair left, Pair right) {
    return {hn::Add(left.a, right.a), hn::Add(left.b, right.b)};
  }

  [[nodiscard]] Pair sum_group(size_t first, size_t last, size_t col) const {
    Pair sum = term(first, col);
    for (size_t i = first + 1; i < last; ++i) {
      sum = add(sum, term(i, col));
    }
    return sum;
  }

  // Sums a pair; the store alone rounds a lone group.
  [[nodiscard]] Pair sum_pair(size_t col) const {
    Pair sum = sum_group(0, terms_.group_ends[0], col);
    if (terms_.group_ends.size() == 1) {
      return sum;
    }
    sum = Format::rounded(sum);
    for (size_t g = 1; g < terms_.group_ends.size(); ++g) {
      const Pair more = sum_group(terms_.group_ends[g - 1], terms_.group_ends[g], col);
      sum = add(sum, Format::rounded(more));
    }
    return sum;
  }

  [[nodiscard]] float sum_one(size_t col) const {
    float total = 0;
    size_t first = 0;
    for (const size_t last : terms_.group_ends) {
      float sum = 0;
      for (size_t i = first; i < last; ++i) {
        const float value = Format::load_one(row(i)[col]);
        const float weighted = kIsWeighted ? value * terms_.weights[i] : value;
        sum = i == first ? weighted : sum + weighted;
      }
      const float partial = Format::load_one(Format::round_one(sum));
      total = first == 0 ? partial : total + partial;
      first = last;
    }
    return total;
  }

  const RowGroups& terms_;
  std::span<const std::byte* const> next_;
};

template <class Format>
void sum_as(
    std::byte* out, const RowGroups& terms, std::span<const std::byte* const> next, size_t num_cols
) {
  if (terms.weights.empty()) {
    Summer<Format, false>(terms, next).sum(out, num_cols);
  } else {
    Summer<Format, true>(terms, next).sum(out, num_cols);
  }
}

void sum_target(
    std::byte* out,
    const RowGroups& terms,
    std::span<const std::byte* const> next,
    DType dtype,
    size_t num_cols
) {
  switch (dtype) {
    case DType::kBFloat16:
      return sum_as<Bf16>(out, terms, next, num_cols);
    case DType::kFloat16:
      return sum_as<Fp16>(out, terms, next, num_cols);
    default:
      return sum_as<Fp32>(out, terms, next, num_cols);
  }
}

const char* target_name() {
  return hwy::TargetName(HWY_TARGET);
}

}  // namespace weft::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft {

HWY_EXPORT(sum_target);
HWY_EXPORT(target_name);

void sum_groups(
    std::byte* out,
    const RowGroups& groups,
    DType dtype,
    int64_t num_cols,
    std::span<const std::byte* const> next
) {
  HWY_DYNAMIC_DISPATCH(sum_target)(out, groups, next, dtype, static_cast<size_t>(num_cols));
}

const char* row_sum_target() {
  return HWY_DYNAMIC_DISPATCH(target_name)();
}

}  // namespace weft
#endif
