// SPDX-License-Identifier: Apache-2.0
#include "exchange/row_sum.hpp"

#include "core/half.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "exchange/row_sum.cpp"
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

// Vector forms of core/half.hpp: the same integer steps, so the same bits.
struct Bf16 {
  using Element = uint16_t;
  static VecF load(const Element* from) {
    return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), from))));
  }
  static void store(VecF value, Element* to) {
    const U32 du;
    const VecU bits = hn::BitCast(du, value);
    const VecU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const VecU rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff))));
    const VecU nan =
        hn::Or(hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000)), hn::Set(du, 0x7fc0));
    const auto is_nan = hn::Gt(
        hn::BitCast(I32(), hn::And(bits, hn::Set(du, 0x7fffffff))), hn::Set(I32(), 0x7f800000)
    );
    const VecU out = hn::IfThenElse(hn::RebindMask(du, is_nan), nan, rounded);
    hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), out)), U16(), to);
  }
  static float load_one(Element from) { return bf16_to_float(from); }
  static Element round_one(float value) { return float_to_bf16(value); }
};

struct Fp16 {
  using Element = uint16_t;
  static VecF load(const Element* from) {
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
  static void store(VecF value, Element* to) {
    const U32 du;
    const VecU bits = hn::BitCast(du, value);
    const VecU sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000));
    const VecU magnitude = hn::And(bits, hn::Set(du, 0x7fffffff));
    const auto signed_magnitude = hn::BitCast(I32(), magnitude);
    const VecU odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
    const VecU normal = hn::ShiftRight<13>(
        hn::Add(hn::Sub(magnitude, hn::Set(du, 0x38000000)), hn::Add(odd, hn::Set(du, 0xfff)))
    );
    const VecF shifted = hn::Add(hn::BitCast(F32(), magnitude), hn::Set(F32(), 0.5F));
    const VecU small = hn::Sub(hn::BitCast(du, shifted), hn::Set(du, 0x3f000000));
    const auto is_small = hn::RebindMask(du, hn::Lt(signed_magnitude, hn::Set(I32(), 0x38800000)));
    const auto is_big = hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(I32(), 0x477fffff)));
    const auto is_nan = hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(I32(), 0x7f800000)));
    const VecU big = hn::IfThenElse(is_nan, hn::Set(du, 0x7e00), hn::Set(du, 0x7c00));
    const VecU out = hn::IfThenElse(is_big, big, hn::IfThenElse(is_small, small, normal));
    hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), hn::Or(sign, out))), U16(), to);
  }
  static float load_one(Element from) { return fp16_to_float(from); }
  static Element round_one(float value) { return float_to_fp16(value); }
};

struct Fp32 {
  using Element = float;
  static VecF load(const Element* from) { return hn::LoadU(F32(), from); }
  static void store(VecF value, Element* to) { hn::StoreU(value, F32(), to); }
  static float load_one(Element from) { return from; }
  static Element round_one(float value) { return value; }
};

// Columns outside, rows inside, with four independent accumulators: each element is read once and
// the loads of several rows are in flight.
template <class Format>
void sum_rows_as(
    std::byte* out_bytes,
    std::span<const std::byte* const> rows,
    const float* weights,
    int64_t num_cols
) {
  using Element = typename Format::Element;
  constexpr size_t kUnroll = 4;
  const size_t lanes = hn::Lanes(F32());
  const auto cols = static_cast<size_t>(num_cols);
  auto* const out = reinterpret_cast<Element*>(out_bytes);
  const auto row = [&](size_t i) { return reinterpret_cast<const Element*>(rows[i]); };
  const auto term = [&](size_t i, size_t col) {
    const VecF value = Format::load(row(i) + col);
    return weights == nullptr ? value : hn::Mul(value, hn::Set(F32(), weights[i]));
  };
  size_t col = 0;
  for (; col + kUnroll * lanes <= cols; col += kUnroll * lanes) {
    VecF s0 = term(0, col);
    VecF s1 = term(0, col + lanes);
    VecF s2 = term(0, col + 2 * lanes);
    VecF s3 = term(0, col + 3 * lanes);
    for (size_t i = 1; i < rows.size(); ++i) {
      s0 = hn::Add(s0, term(i, col));
      s1 = hn::Add(s1, term(i, col + lanes));
      s2 = hn::Add(s2, term(i, col + 2 * lanes));
      s3 = hn::Add(s3, term(i, col + 3 * lanes));
    }
    Format::store(s0, out + col);
    Format::store(s1, out + col + lanes);
    Format::store(s2, out + col + 2 * lanes);
    Format::store(s3, out + col + 3 * lanes);
  }
  for (; col < cols; ++col) {
    const auto one = [&](size_t i) {
      const float value = Format::load_one(row(i)[col]);
      return weights == nullptr ? value : value * weights[i];
    };
    float sum = one(0);
    for (size_t i = 1; i < rows.size(); ++i) {
      sum += one(i);
    }
    out[col] = Format::round_one(sum);
  }
}

void sum_rows_target(
    std::byte* out,
    std::span<const std::byte* const> rows,
    const float* weights,
    DType dtype,
    int64_t num_cols
) {
  switch (dtype) {
    case DType::kBFloat16:
      return sum_rows_as<Bf16>(out, rows, weights, num_cols);
    case DType::kFloat16:
      return sum_rows_as<Fp16>(out, rows, weights, num_cols);
    default:
      return sum_rows_as<Fp32>(out, rows, weights, num_cols);
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
    int64_t num_cols
) {
  HWY_DYNAMIC_DISPATCH(sum_rows_target)(out, rows, weights, dtype, num_cols);
}

const char* row_sum_target() {
  return HWY_DYNAMIC_DISPATCH(target_name)();
}

}  // namespace weft
#endif
