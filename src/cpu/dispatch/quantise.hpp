// SPDX-License-Identifier: Apache-2.0
// FP8 rows of a rank's bf16 tokens, made before dispatch moves them, as bytes with their scales.
// Previous: the caller's input; next: push.hpp, as if the caller had given FP8 rows.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "call/quantise.hpp"
#include "core/fp8.hpp"
#include "core/half.hpp"
#include "cpu/protocol/worker_pool.hpp"

namespace weft {

// What dispatch moves: the input as it was given, or its FP8 rows, which live as long as this.
class StoredInput {
 public:
  StoredInput(const DispatchInput& in, WorkerPool& workers) : in_(in) {
    if (in.quantise == Quantise::kNone) {
      return;
    }
    const int64_t num_groups = in.x.cols / kQuantiseGroup;
    const bool is_byte = scale_bytes(in.scale_rule) == 1;
    rows_.resize(static_cast<size_t>(in.x.rows * in.x.cols));
    scales_.resize(static_cast<size_t>(in.x.rows * num_groups * scale_bytes(in.scale_rule)));
    const bool is_much = in.x.num_bytes() > kMuch;
    workers.for_each(static_cast<size_t>(in.x.rows), is_much, [&](size_t token) {
      const auto first = token * static_cast<size_t>(num_groups);
      for (size_t group = first; group < first + static_cast<size_t>(num_groups); ++group) {
        quantise_group(in, group);
      }
    });
    in_.x = matrix(rows_.data(), in.x.rows, in.x.cols);
    in_.scales = matrix(scales_.data(), in.x.rows, num_groups);
    in_.scales.dtype = is_byte ? DType::kByte : DType::kFloat32;
    in_.quantise = Quantise::kNone;
  }

  StoredInput(StoredInput&&) = default;  // a copy would name the rows of this one
  StoredInput& operator=(StoredInput&&) = default;

  [[nodiscard]] const DispatchInput& get() const { return in_; }

 private:
  static constexpr int64_t kMuch = 1 << 18;  // bytes for which workers are woken: guess

  void quantise_group(const DispatchInput& in, size_t group) {
    const auto* x = reinterpret_cast<const uint16_t*>(in.x.data);
    const size_t first = group * kQuantiseGroup;
    float largest = 0;
    for (size_t i = first; i < first + kQuantiseGroup; ++i) {
      largest = std::fmax(largest, std::fabs(bf16_to_float(x[i])));
    }
    const float scale = scale_of(largest, in.quantise, in.scale_rule);
    const Fp8Format& format = in.quantise == Quantise::kE4M3 ? kFp8E4M3 : kFp8E5M2;
    for (size_t i = first; i < first + kQuantiseGroup; ++i) {
      rows_[i] = static_cast<std::byte>(float_to_fp8(bf16_to_float(x[i]) / scale, format));
    }
    if (in.scale_rule == ScaleRule::kUe8m0) {
      scales_[group] = static_cast<std::byte>(ue8m0_of(scale));
    } else {
      std::memcpy(&scales_[group * sizeof(float)], &scale, sizeof(float));
    }
  }

  DispatchInput in_;
  std::vector<std::byte> rows_;
  std::vector<std::byte> scales_;
};

}  // namespace weft
