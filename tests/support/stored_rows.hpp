// SPDX-License-Identifier: Apache-2.0
// Rows that dispatch stores for bf16 rows, by the rules in the words of include/weft/calls.hpp,
// slowly and sharing nothing with the code under test but the sizes of groups.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "call/quantise.hpp"
#include "core/half.hpp"
#include "support/exchange_case.hpp"
#include "support/fp8.hpp"
#include "support/memory.hpp"

namespace weft::test {

struct StoredRows {
  Matrix rows;
  Matrix scales;
};

// The exponent of the least power of two that is not below `value`.
inline int exponent_above(float value) {
  int exponent = 0;
  return std::frexp(value, &exponent) == 0.5F ? exponent - 1 : exponent;
}

struct GroupScale {
  float stored;
  float factor;  // of elements before they are rounded
};

inline GroupScale group_scale(float largest, float last, ScaleRule rule) {
  const bool is_exact = rule == ScaleRule::kExact;
  if (is_exact && !(largest > 0)) {
    return {1, 1};
  }
  const float counted = std::max(largest, is_exact ? std::ldexp(1.0F, -110) : 1e-4F);
  const float scale = counted * (1 / last);
  if (is_exact || rule == ScaleRule::kClamped) {
    return {scale, last / counted};
  }
  const int exponent = exponent_above(scale);
  return {std::ldexp(1.0F, exponent), std::ldexp(1.0F, -exponent)};
}

// One group after the other.
class GroupStore {
 public:
  GroupStore(const Case& spec, Quantise kind, StoredRows& out)
      : rule_(spec.scale_rule),
        kind_(kind),
        global_scale_(spec.global_scale > 0 ? spec.global_scale : 1),
        rows_(out.rows.as<uint8_t>()),
        scales_(out.scales) {}

  void add(size_t group, std::span<const float> values) {
    float largest = 0;
    for (const float value : values) {
      largest = std::isnan(value) ? value : std::max(largest, std::fabs(value));
      if (std::isnan(largest)) {
        break;
      }
    }
    switch (kind_) {
      case Quantise::kMxfp8:
        return add_mxfp8(group, values, largest);
      case Quantise::kNvfp4:
        return add_nvfp4(group, values, largest);
      default:
        return add_fp8(group, values, largest);
    }
  }

 private:
  void add_fp8(size_t group, std::span<const float> values, float largest) {
    const float last = fp8_to_float(num_finite_fp8(kind_) - 1, kind_);
    const GroupScale scale = group_scale(largest, last, rule_);
    if (rule_ == ScaleRule::kUe8m0) {
      scales_.as<uint8_t>()[group] = static_cast<uint8_t>(exponent_above(scale.stored) + 127);
    } else {
      scales_.as<float>()[group] = scale.stored;
    }
    for (size_t i = 0; i < values.size(); ++i) {
      rows_[group * values.size() + i] = nearest_fp8(values[i] * scale.factor, kind_);
    }
  }

  void add_mxfp8(size_t group, std::span<const float> values, float largest) {
    const bool is_nan = std::isnan(largest);
    const int code = is_nan ? 255 : e8m0_not_below(static_cast<double>(largest) / 448);
    scales_.as<uint8_t>()[group] = static_cast<uint8_t>(code);
    for (size_t i = 0; i < values.size(); ++i) {
      const double value = std::ldexp(static_cast<double>(values[i]), 127 - code);
      rows_[group * values.size() + i] =
          is_nan ? 0x7f : nearest_fp8(static_cast<float>(value), Quantise::kE4M3);
    }
  }

  void add_nvfp4(size_t group, std::span<const float> values, float largest) {
    const bool is_nan = std::isnan(largest);
    const float wanted = global_scale_ * (largest / 6);
    const bool is_e8m0 = rule_ == ScaleRule::kUe8m0;
    uint8_t code = is_e8m0 ? 255 : 0x7f;
    float factor = 0;
    if (!is_nan && is_e8m0) {
      code = static_cast<uint8_t>(e8m0_not_below(static_cast<double>(wanted)));
      factor = code == 0 ? 0 : global_scale_ * std::ldexp(1.0F, 127 - code);
    } else if (!is_nan) {
      code = nearest_fp8(wanted, Quantise::kE4M3);
      factor = code == 0 ? 0 : global_scale_ / fp8_to_float(code, Quantise::kE4M3);
    }
    factor = std::min(factor, std::numeric_limits<float>::max());
    scales_.as<uint8_t>()[group] = code;
    const auto element = [&](size_t i) {
      return is_nan ? 7 : int{nearest_fp4(values[i] * factor)};
    };
    for (size_t i = 0; i < values.size(); i += 2) {
      rows_[(group * values.size() + i) / 2] =
          static_cast<uint8_t>(element(i) | element(i + 1) << 4);
    }
  }

  ScaleRule rule_;
  Quantise kind_;
  float global_scale_;
  uint8_t* rows_;
  Matrix& scales_;
};

[[nodiscard]] inline StoredRows quantised(const Matrix& x, const Case& spec, Quantise kind) {
  const ConstTensor view = x.view();
  const StoredFormat format = stored_format(kind, spec.scale_rule);
  const DType scale_dtype = format.scale_bytes == 1 ? DType::kByte : DType::kFloat32;
  StoredRows out = {
      Matrix(DType::kByte, view.rows, view.cols / format.elements_per_byte),
      Matrix(scale_dtype, view.rows, view.cols / format.group)};
  GroupStore store(spec, kind, out);
  std::vector<float> values(static_cast<size_t>(format.group));
  for (size_t group = 0; group * values.size() < x.num_elements(); ++group) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = bf16_to_float(x.as<uint16_t>()[group * values.size() + i]);
    }
    store.add(group, values);
  }
  return out;
}

}  // namespace weft::test
