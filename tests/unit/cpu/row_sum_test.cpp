// SPDX-License-Identifier: Apache-2.0
#include "cpu/combine/row_sum.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "core/half.hpp"
#include "support/compare.hpp"
#include "support/memory.hpp"

namespace weft::test {
namespace {

float load(const Matrix& row, DType dtype, size_t col) {
  switch (dtype) {
    case DType::kBFloat16:
      return bf16_to_float(row.as<uint16_t>()[col]);
    case DType::kFloat16:
      return fp16_to_float(row.as<uint16_t>()[col]);
    default:
      return row.as<float>()[col];
  }
}

void store(Matrix& row, DType dtype, size_t col, float value) {
  switch (dtype) {
    case DType::kBFloat16:
      row.as<uint16_t>()[col] = float_to_bf16(value);
      break;
    case DType::kFloat16:
      row.as<uint16_t>()[col] = float_to_fp16(value);
      break;
    default:
      row.as<float>()[col] = value;
  }
}

Matrix scalar_sum(const std::vector<Matrix>& rows, const float* weights, DType dtype) {
  const int64_t num_cols = rows[0].view().cols;
  Matrix out(dtype, 1, num_cols);
  for (size_t col = 0; col < static_cast<size_t>(num_cols); ++col) {
    const auto term = [&](size_t i) {
      const float value = load(rows[i], dtype, col);
      return weights == nullptr ? value : value * weights[i];
    };
    float sum = term(0);
    for (size_t i = 1; i < rows.size(); ++i) {
      sum += term(i);
    }
    store(out, dtype, col, sum);
  }
  return out;
}

void expect_scalar_bits(const std::vector<Matrix>& rows, const float* weights, DType dtype) {
  RowGroups terms;
  for (const Matrix& row : rows) {
    terms.rows.push_back(row.view().data);
  }
  terms.group_ends = {rows.size()};
  terms.weights.assign(weights, weights + (weights == nullptr ? 0 : rows.size()));
  const int64_t num_cols = rows[0].view().cols;
  Matrix out(dtype, 1, num_cols);
  sum_groups(out.view().data, terms, dtype, num_cols);
  const Matrix expected = scalar_sum(rows, weights, dtype);
  ASSERT_EQ(first_difference("sum", out.view(), expected.view()), "")
      << dtype_name(dtype) << ", " << rows.size() << " rows of " << num_cols << ", "
      << (weights == nullptr ? "plain" : "weighted") << ", " << row_sum_target();
  ASSERT_TRUE(out.has_guards_untouched()) << num_cols << " columns";
}

class RowSumTest : public testing::TestWithParam<DType> {};

TEST_P(RowSumTest, GivesTheBitsOfAScalarLoop) {
  const DType dtype = GetParam();
  RandomSource random(3);
  for (const int64_t num_cols : {1, 7, 8, 15, 16, 31, 33, 64, 65, 127, 200}) {
    for (const size_t num_rows : {1U, 2U, 3U, 8U, 32U}) {
      std::vector<Matrix> rows;
      std::vector<float> weights;
      for (size_t i = 0; i < num_rows; ++i) {
        rows.push_back(random_values(dtype, 1, num_cols, random));
        weights.push_back(random.uniform() * 2 - 1);
      }
      expect_scalar_bits(rows, nullptr, dtype);
      expect_scalar_bits(rows, weights.data(), dtype);
    }
  }
}

TEST_P(RowSumTest, KeepsInfinityNanSubnormalsAndMinusZero) {
  const DType dtype = GetParam();
  const float inf = std::numeric_limits<float>::infinity();
  const float smallest = dtype == DType::kFloat16 ? 0x1p-24F : 0x1p-133F;
  // One special value meets ordinary ones in each column: two NaN have no order.
  const std::vector<std::array<float, 3>> columns = {
      {inf, 1, 2},
      {1, -inf, 2},
      {inf, -inf, 1},
      {1, 2, std::numeric_limits<float>::quiet_NaN()},
      {-std::numeric_limits<float>::quiet_NaN(), 1, 1},
      {-0.0F, -0.0F, -0.0F},
      {0.0F, -0.0F, -0.0F},
      {smallest, 0, smallest},
      {smallest, -smallest, -smallest},
      {60000, 60000, -60000}};
  std::vector<Matrix> rows;
  for (size_t i = 0; i < 3; ++i) {
    Matrix& row = rows.emplace_back(dtype, 1, 160);
    for (size_t col = 0; col < 160; ++col) {
      store(row, dtype, col, columns[col % columns.size()][i]);
    }
  }
  expect_scalar_bits(rows, nullptr, dtype);
  const std::array<float, 3> weights = {1, 0.5F, -1};
  expect_scalar_bits(rows, weights.data(), dtype);
}

TEST_P(RowSumTest, PassesEveryBitPatternOfOneRow) {
  const DType dtype = GetParam();
  if (dtype == DType::kFloat32) {
    RandomSource random(5);
    expect_scalar_bits({random_bits(dtype, 1, 1 << 16, random)}, nullptr, dtype);
    return;
  }
  std::vector<Matrix> rows;
  auto& row = rows.emplace_back(dtype, 1, 1 << 16);
  std::iota(row.as<uint16_t>(), row.as<uint16_t>() + row.num_elements(), uint16_t{0});
  expect_scalar_bits(rows, nullptr, dtype);
}

// 1 times any weight: every kind of fp32 value meets the rounding.
TEST_P(RowSumTest, RoundsEveryKindOfFloat) {
  const DType dtype = GetParam();
  std::vector<Matrix> rows;
  auto& row = rows.emplace_back(dtype, 1, 67);
  for (size_t col = 0; col < row.num_elements(); ++col) {
    store(row, dtype, col, 1);
  }
  RandomSource random(7);
  for (int i = 0; i < 20000; ++i) {
    auto bits = static_cast<uint32_t>(random.next());
    if (i % 4 == 0) {  // halfway between two short values, or one beside
      bits = (bits & 0xfffff000U) + 0x1000U * (bits & 1U) + static_cast<uint32_t>(i / 4 % 3) - 1;
    }
    if (i % 4 == 1) {  // the exponents where fp16 ends, at either side
      bits = (bits & 0x807fffffU) | ((bits & 8U) != 0 ? 0x47000000U : 0x38000000U);
    }
    const float weight = std::bit_cast<float>(bits);
    expect_scalar_bits(rows, &weight, dtype);
    if (HasFatalFailure()) {
      FAIL() << "weight " << weight << " = " << std::hex << bits;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, RowSumTest, testing::Values(DType::kBFloat16, DType::kFloat16, DType::kFloat32)
);

}  // namespace
}  // namespace weft::test
