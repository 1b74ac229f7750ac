// SPDX-License-Identifier: Apache-2.0
// Quantised rows of a rank's bf16 tokens, made before dispatch moves them, as bytes with their
// scales. Previous: the caller's input; next: push.hpp, as if the caller had given such rows.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "call/mxfp8.hpp"
#include "call/nvfp4.hpp"
#include "call/quantise.hpp"
#include "core/fp8.hpp"
#include "core/half.hpp"
#include "cpu/protocol/worker_pool.hpp"

namespace weft {

// The elements of a group, where they are stored, and where their scale is.
struct QuantisedGroup {
  std::span<const uint16_t> x;  // bf16
  std::byte* row;
  std::byte* scale;
};

inline void quantise_fp8(const QuantisedGroup& group, const DispatchInput& in) {
  float largest = 0;
  for (const uint16_t x : group.x) {
    largest = std::fmax(largest, std::fabs(bf16_to_float(x)));
  }
  const Fp8Scale scale = fp8_scale(largest, in.quantise, in.scale_rule);
  const Fp8Format& format = in.quantise == Quantise::kE4M3 ? kFp8E4M3 : kFp8E5M2;
  for (size_t i = 0; i < group.x.size(); ++i) {
    group.row[i] = std::byte{float_to_fp8(bf16_to_float(group.x[i]) * scale.factor, format)};
  }
  if (in.scale_rule == ScaleRule::kUe8m0) {
    *group.scale = static_cast<std::byte>(ue8m0_of(scale.stored));
  } else {
    std::memcpy(group.scale, &scale.stored, sizeof(float));
  }
}

inline float largest_magnitude(std::span<const uint16_t> group) {
  float largest = 0;
  for (const uint16_t x : group) {
    largest = larger_magnitude(largest, bf16_to_float(x));
  }
  return largest;
}

inline void quantise_mxfp8(const QuantisedGroup& group) {
  const BlockScale scale = mxfp8_scale(largest_magnitude(group.x));
  for (size_t i = 0; i < group.x.size(); ++i) {
    group.row[i] = std::byte{float_to_fp8(bf16_to_float(group.x[i]) * scale.factor, kFp8E4M3)};
  }
  *group.scale = std::byte{scale.stored};
}

inline void quantise_nvfp4(
    const QuantisedGroup& group, const DispatchInput& in, float global_scale
) {
  const BlockScale scale = nvfp4_scale(largest_magnitude(group.x), global_scale, in.scale_rule);
  const auto code = [&](size_t i) {
    return float_to_fp4(bf16_to_float(group.x[i]) * scale.factor);
  };
  for (size_t i = 0; i < group.x.size(); i += 2) {
    group.row[i / 2] = static_cast<std::byte>(code(i) | code(i + 1) << 4);
  }
  *group.scale = std::byte{scale.stored};
}

// Input that dispatch moves: as it was given, or its quantised rows, which live as long as this.
class StoredInput {
 public:
  StoredInput(const DispatchInput& in, WorkerPool& workers) : in_(in) {
    if (in.quantise == Quantise::kNone) {
      return;
    }
    format_ = stored_format(in.quantise, in.scale_rule);
    global_scale_ =
        in.global_scale.is_given() ? *reinterpret_cast<const float*>(in.global_scale.data) : 1.0F;
    const int64_t row_bytes = in.x.cols / format_.elements_per_byte;
    const int64_t num_groups = in.x.cols / format_.group;
    rows_.resize(static_cast<size_t>(in.x.rows * row_bytes));
    scales_.resize(static_cast<size_t>(in.x.rows * num_groups * format_.scale_bytes));
    const bool is_much = in.x.num_bytes() > kMuch;
    workers.for_each(static_cast<size_t>(in.x.rows), is_much, [&](size_t token) {
      const auto first = token * static_cast<size_t>(num_groups);
      for (size_t group = first; group < first + static_cast<size_t>(num_groups); ++group) {
        quantise_group(in, group);
      }
    });
    in_.x = matrix(rows_.data(), in.x.rows, row_bytes);
    in_.scales = matrix(scales_.data(), in.x.rows, num_groups);
    in_.scales.dtype = format_.scale_bytes == 1 ? DType::kByte : DType::kFloat32;
    in_.quantise = Quantise::kNone;
  }

  StoredInput(StoredInput&&) = default;  // a copy would name the rows of this one
  StoredInput& operator=(StoredInput&&) = default;

  [[nodiscard]] const DispatchInput& get() const { return in_; }

 private:
  static constexpr int64_t kMuch = 1 << 18;  // bytes for which workers are woken: guess

  void quantise_group(const DispatchInput& in, size_t index) {
    const auto* x = reinterpret_cast<const uint16_t*>(in.x.data);
    const auto size = static_cast<size_t>(format_.group);
    const QuantisedGroup group = {
        {x + index * size, size},
        rows_.data() + index * size / static_cast<size_t>(format_.elements_per_byte),
        scales_.data() + index * static_cast<size_t>(format_.scale_bytes)};
    switch (in.quantise) {
      case Quantise::kMxfp8:
        return quantise_mxfp8(group);
      case Quantise::kNvfp4:
        return quantise_nvfp4(group, in, global_scale_);
      default:
        return quantise_fp8(group, in);
    }
  }

  DispatchInput in_;
  StoredFormat format_ = {};
  float global_scale_ = 1;
  std::vector<std::byte> rows_;
  std::vector<std::byte> scales_;
};

}  // namespace weft
