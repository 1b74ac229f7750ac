// SPDX-License-Identifier: Apache-2.0
#include "exchange/row_sum.hpp"

#include "core/half.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "exchange/row_sum.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // compiles this file once per vector target
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace weft::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using I32 = hn::RebindToSigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;
using VecF = hn::Vec<F32>;
using VecU = hn::Vec<U32>;

// Each format loads and stores two vectors' worth of adjacent elements at once; which element lies
// in which lane is its own affair. The results are those of core/half.hpp, bit for bit.
struct Pair {
  VecF a;
  VecF b;
};

struct Fp32 {
  using Element = float;
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
  // The rounded value in the upper half, noise below.
  static VecU round(VecF value) {
    const U32 du;
    const VecU bits = hn::BitCast(du, value);
    const VecU is_odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const VecU rounded = hn::Add(bits, hn::Add(is_odd, hn::Set(du, 0x7fff)));
    const VecU nan = hn::Or(hn::And(bits, hn::Set(du, 0x80000000U)), hn::Set(du, 0x7fc00000U));
    return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), nan, rounded);
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
  static Pair load(const Element* from) {
    return {load_half(from), load_half(from + hn::Lanes(F32()))};
  }
  static void store(Pair value, Element* to) {
    store_half(value.a, to);
    store_half(value.b, to + hn::Lanes(F32()));
  }
  static float load_one(Element from) { return fp16_to_float(from); }
  static Element round_one(float value) { return float_to_fp16(value); }

#if HWY_TARGET <= HWY_AVX2  // has conversions; they keep the payload of a NaN, so that is set here
  static VecF load_half(const Element* from) {
    const hn::Rebind<hwy::float16_t, F32> half;
    return hn::PromoteTo(F32(), hn::BitCast(half, hn::LoadU(U16(), from)));
  }
  static void store_half(VecF value, Element* to) {
    const hn::Rebind<hwy::float16_t, F32> half;
    if (HWY_LIKELY(hn::AllFalse(F32(), hn::IsNaN(value)))) {
      hn::StoreU(hn::BitCast(U16(), hn::DemoteTo(half, value)), U16(), to);
      return;
    }
    HWY_ALIGN float lanes[hn::MaxLanes(F32())];
    hn::Store(value, F32(), lanes);
    for (size_t i = 0; i < hn::Lanes(F32()); ++i) {
      to[i] = float_to_fp16(lanes[i]);
    }
  }
#else  // the integer steps of core/half.hpp
  static VecF load_half(const Element* from) {
    const U32 du;
    const VecU bits = hn::PromoteTo(du, hn::LoadU(U16(), from));
    const VecU sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000)));
    const VecU magnitude = hn::And(bits, hn::Set(du, 0x7fff));
    const VecF scaled =
        hn::Mul(hn::BitCast(F32(), hn::ShiftLeft<13>(magnitude)), hn::Set(F32(), 0x1p112F));
    const auto has_mantissa = hn::Ne(hn::And(bits, hn::Set(du, 0x3ff)), hn::Zero(du));
    const VecU special =
        hn::Or(hn::Set(du, 0x7f800000), hn::IfThenElseZero(has_mantissa, hn::Set(du, 0x400000)));
    const auto is_special = hn::Eq(hn::And(magnitude, hn::Set(du, 0x7c00)), hn::Set(du, 0x7c00));
    const VecU out = hn::IfThenElse(is_special, special, hn::BitCast(du, scaled));
    return hn::BitCast(F32(), hn::Or(sign, out));
  }
  static void store_half(VecF value, Element* to) {
    const U32 du;
    const VecU bits = hn::BitCast(du, value);
    const VecU sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000));
    const VecU magnitude = hn::And(bits, hn::Set(du, 0x7fffffff));
    const auto ordered = hn::BitCast(I32(), magnitude);
    const VecU is_odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
    const VecU normal = hn::ShiftRight<13>(
        hn::Add(hn::Sub(magnitude, hn::Set(du, 0x38000000)), hn::Add(is_odd, hn::Set(du, 0xfff)))
    );
    const VecF shifted = hn::Add(hn::BitCast(F32(), magnitude), hn::Set(F32(), 0.5F));
    const VecU small = hn::Sub(hn::BitCast(du, shifted), hn::Set(du, 0x3f000000));
    const auto is_small = hn::RebindMask(du, hn::Lt(ordered, hn::Set(I32(), 0x38800000)));
    const auto is_big = hn::RebindMask(du, hn::Gt(ordered, hn::Set(I32(), 0x477fffff)));
    const auto is_nan = hn::RebindMask(du, hn::Gt(ordered, hn::Set(I32(), 0x7f800000)));
    const VecU big = hn::IfThenElse(is_nan, hn::Set(du, 0x7e00), hn::Set(du, 0x7c00));
    const VecU out = hn::IfThenElse(is_big, big, hn::IfThenElse(is_small, small, normal));
    hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), hn::Or(sign, out))), U16(), to);
  }
#endif
};

struct Terms {
  std::span<const std::byte* const> rows;
  const float* weights;
  std::span<const std::byte* const> next;
};

// Columns outside, rows inside: each element is read once and loads of several rows are in flight.
template <class Format, bool kIsWeighted>
void sum_rows_as(std::byte* out_bytes, const Terms& terms, size_t num_cols) {
  using Element = typename Format::Element;
  const size_t lanes = hn::Lanes(F32());
  const size_t block = 2 * lanes;  // elements of a pair
  auto* const out = reinterpret_cast<Element*>(out_bytes);
  const auto row = [&](size_t i) { return reinterpret_cast<const Element*>(terms.rows[i]); };
  const auto term = [&](size_t i, size_t col) {
    Pair value = Format::load(row(i) + col);
    if constexpr (kIsWeighted) {
      const VecF weight = hn::Set(F32(), terms.weights[i]);
      value = {hn::Mul(value.a, weight), hn::Mul(value.b, weight)};
    }
    return value;
  };
  size_t col = 0;
  for (; col + block <= num_cols; col += block) {
    for (const std::byte* soon : terms.next) {
      for (size_t line = 0; line < block * sizeof(Element); line += 64) {
        hwy::Prefetch(soon + col * sizeof(Element) + line);
      }
    }
    Pair sum = term(0, col);
    for (size_t i = 1; i < terms.rows.size(); ++i) {
      const Pair more = term(i, col);
      sum = {hn::Add(sum.a, more.a), hn::Add(sum.b, more.b)};
    }
    Format::store(sum, out + col);
  }
  for (; col < num_cols; ++col) {
    const auto one = [&](size_t i) {
      const float value = Format::load_one(row(i)[col]);
      return kIsWeighted ? value * terms.weights[i] : value;
    };
    float sum = one(0);
    for (size_t i = 1; i < terms.rows.size(); ++i) {
      sum += one(i);
    }
    out[col] = Format::round_one(sum);
  }
}

template <class Format>
void sum_rows_of(std::byte* out, const Terms& terms, size_t num_cols) {
  if (terms.weights == nullptr) {
    sum_rows_as<Format, false>(out, terms, num_cols);
  } else {
    sum_rows_as<Format, true>(out, terms, num_cols);
  }
}

void sum_rows_target(
    std::byte* out,
    std::span<const std::byte* const> rows,
    const float* weights,
    DType dtype,
    int64_t num_cols,
    std::span<const std::byte* const> next
) {
  const Terms terms = {rows, weights, next};
  const auto cols = static_cast<size_t>(num_cols);
  switch (dtype) {
    case DType::kBFloat16:
      return sum_rows_of<Bf16>(out, terms, cols);
    case DType::kFloat16:
      return sum_rows_of<Fp16>(out, terms, cols);
    default:
      return sum_rows_of<Fp32>(out, terms, cols);
  }
}

const char* target_name() {
  return hwy::TargetName(HWY_TARGET);
}

}  // namespace weft::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft {

HWY_EXPORT(sum_rows_target);
HWY_EXPORT(target_name);

void sum_rows(
    std::byte* out,
    std::span<const std::byte* const> rows,
    const float* weights,
    DType dtype,
    int64_t num_cols,
    std::span<const std::byte* const> next
) {
  HWY_DYNAMIC_DISPATCH(sum_rows_target)(out, rows, weights, dtype, num_cols, next);
}

const char* row_sum_target() {
  return HWY_DYNAMIC_DISPATCH(target_name)();
}

}  // namespace weft
#endif
