// SPDX-License-Identifier: Apache-2.0
#include "cpu/combine/coded_sum.hpp"

#include <array>

#include "call/wire.hpp"
#include "core/half.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/combine/coded_sum.cpp"
#include <hwy/foreach_target.h>  // compiles this file once per vector target
#include <hwy/highway.h>

// The loops are plain ones, which the compiler makes of each target's vectors.
HWY_BEFORE_NAMESPACE();
namespace weft::HWY_NAMESPACE {

using Values = std::array<float, kQuantiseGroup>;  // of a group of columns

// A coded row of one group of columns.
using Code = std::array<std::byte, wire_row_bytes(Wire::kLogFmt10, kQuantiseGroup)>;

class CodedSum {
 public:
  CodedSum(const RowGroups& groups, Wire wire, int64_t num_cols)
      : groups_(groups), wire_(wire), num_cols_(num_cols) {}

  // Adds up the bf16 rows of a group, in columns [128 * block, 128 * block + 128).
  void add_rows(size_t group, int64_t block, Values& sum) const {
    const size_t begin = group == 0 ? 0 : groups_.group_ends[group - 1];
    for (size_t i = begin; i < groups_.group_ends[group]; ++i) {
      const auto* row = reinterpret_cast<const uint16_t*>(groups_.rows[i]) + block * kQuantiseGroup;
      const float weight = groups_.weights.empty() ? 1.0F : groups_.weights[i];
      for (size_t col = 0; col < sum.size(); ++col) {
        const float term = bf16_to_float(row[col]) * weight;
        sum[col] = i == begin ? term : sum[col] + term;
      }
    }
  }

  // Adds up what the codes of all groups stand for.
  void add_groups(int64_t block, Values& sum) const {
    Values one;
    for (size_t group = 0; group < groups_.group_ends.size(); ++group) {
      Values& to = group == 0 ? sum : one;
      if (groups_.is_coded[group]) {
        const std::byte* row = groups_.rows[groups_.group_ends[group] - 1];
        read_group(wire_, row, num_cols_, block, to.data());
      } else {
        Code code;
        add_rows(group, block, to);
        code_group(wire_, to.data(), code.data(), kQuantiseGroup, 0);
        read_group(wire_, code.data(), kQuantiseGroup, 0, to.data());
      }
      for (size_t col = 0; group > 0 && col < sum.size(); ++col) {
        sum[col] += one[col];
      }
    }
  }

 private:
  const RowGroups& groups_;
  Wire wire_;
  int64_t num_cols_;
};

void sum_coded_target(
    std::byte* out, const RowGroups& groups, Wire wire, SumFor what, int64_t num_cols
) {
  const CodedSum rows(groups, wire, num_cols);
  for (int64_t block = 0; block < num_cols / kQuantiseGroup; ++block) {
    Values sum = {};  // of no groups
    what == SumFor::kRank ? rows.add_rows(0, block, sum) : rows.add_groups(block, sum);
    if (what != SumFor::kToken) {
      code_group(wire, sum.data(), out, num_cols, block);
      continue;
    }
    auto* const to = reinterpret_cast<uint16_t*>(out) + block * kQuantiseGroup;
    for (size_t col = 0; col < sum.size(); ++col) {
      to[col] = float_to_bf16(sum[col]);
    }
  }
}

}  // namespace weft::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft {

HWY_EXPORT(sum_coded_target);

void sum_coded_groups(
    std::byte* out, const RowGroups& groups, Wire wire, SumFor what, int64_t num_cols
) {
  HWY_DYNAMIC_DISPATCH(sum_coded_target)(out, groups, wire, what, num_cols);
}

}  // namespace weft
#endif
