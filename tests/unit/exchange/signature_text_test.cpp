// SPDX-License-Identifier: Apache-2.0
#include "exchange/signature_text.hpp"

#include <gtest/gtest.h>

namespace weft {
namespace {

constexpr int64_t kFloat16 = static_cast<int64_t>(DType::kFloat16);

std::string values_of(Op op, size_t field, int64_t mine, int64_t theirs) {
  const std::string text = signature_text(op, field, mine, theirs, 5);
  const std::string end = " on rank 5 (must be equal on all ranks)";
  EXPECT_TRUE(text.ends_with(end)) << text;
  return text.substr(0, text.size() - end.size());
}

TEST(SignatureTextTest, ValuesAreWords) {
  EXPECT_EQ(values_of(Op::kPlan, 0, 2, 0), "layout = expert_strided here and rank_major");
  EXPECT_EQ(values_of(Op::kPlan, 3, 1, 0), "overflow = error here and drop");
  EXPECT_EQ(values_of(Op::kPlan, 5, 0, 1), "from_map = false here and true");
  EXPECT_EQ(values_of(Op::kDispatch, 1, kFloat16, 3), "dtype of x = float16 here and byte");
  EXPECT_EQ(values_of(Op::kDispatch, 3, 56, -1), "row bytes of scales = 56 here and none");
  EXPECT_EQ(values_of(Op::kDispatch, 5, 2, 0), "quantise = e5m2 here and none");
  EXPECT_EQ(values_of(Op::kDispatch, 6, 1, 0), "copy_engines = true here and false");
  EXPECT_EQ(values_of(Op::kCombine, 3, 1, 2), "scale = plan_weights here and source_weights");
}

TEST(SignatureTextTest, RowsThatGoWithAPlanAreTold) {
  const auto field = routed_rows_field;
  EXPECT_EQ(
      values_of(Op::kPlan, 7, field(DType::kFloat16, Quantise::kNone, false), 0),
      "rows that go with it = float16 here and none"
  );
  EXPECT_EQ(
      values_of(
          Op::kPlan,
          7,
          field(DType::kBFloat16, Quantise::kE4M3, true),
          field(DType::kBFloat16, Quantise::kNone, true)
      ),
      "rows that go with it = bfloat16 as e4m3 with weights here and bfloat16 with weights"
  );
}

TEST(SignatureTextTest, NumbersStayNumbersAndUnknownOnesToo) {
  EXPECT_EQ(values_of(Op::kPlan, 1, 16, 1), "pad_multiple = 16 here and 1");
  EXPECT_EQ(values_of(Op::kPlan, 0, 3, -1), "layout = 3 here and -1");
  EXPECT_EQ(values_of(Op::kCombine, 1, 7, 0), "dtype of rows = 7 here and bfloat16");
  EXPECT_EQ(values_of(Op::kCombine, 6, 7, 0), "a field of its word = 7 here and 0");
}

}  // namespace
}  // namespace weft
