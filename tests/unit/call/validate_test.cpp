// SPDX-License-Identifier: Apache-2.0
// The text of every refusal. That a refusal reaches all ranks is shown in tests/fault.
#include "call/validate.hpp"

#include <gtest/gtest.h>

#include <functional>

#include "support/case_data.hpp"
#include "support/errors.hpp"

namespace weft::test {
namespace {

constexpr uint64_t kExchange = 9;
const Context kContext = {.rank = 0, .num_ranks = 2, .transport = "shm"};

ExchangeConfig good_config() {
  return {.hidden = 32, .max_tokens = 64, .num_experts = 8, .max_topk = 4, .device = {}};
}

class ValidateTest : public testing::Test {
 protected:
  explicit ValidateTest(Layout layout = Layout::kExpertMajor) {
    Case spec;
    spec.num_tokens = {10, 3};
    spec.layout = layout;
    spec.scale_cols = 4;
    spec.asks_beside = true;
    spec.room = Room::kSpare;  // so that no size is zero
    data_ = make_case_data({}, spec);
    plan_ = contents_of(data_.plans[0]);
    plan_.exchange_id = kExchange;
    num_rows_ = std::to_string(plan_.num_rows);
    dispatch_in_ = data_.calls[0][0].dispatch_input();
    dispatch_out_ = data_.calls[0][0].dispatch_output();
    combine_in_ = data_.calls[1][0].combine_input(CombineScale::kNone);
    combine_out_ = data_.calls[1][0].combine_output();
  }

  [[nodiscard]] std::string dispatch() const {
    return text([&] {
      Validator{kContext, config_, kExchange}.dispatch(plan_, dispatch_in_, dispatch_out_);
    });
  }
  [[nodiscard]] std::string combine() const {
    return text([&] {
      Validator{kContext, config_, kExchange}.combine(plan_, combine_in_, combine_out_);
    });
  }

  ExchangeConfig config_ = good_config();
  CaseData data_;
  PlanData plan_;
  std::string num_rows_;
  DispatchInput dispatch_in_;
  DispatchOutput dispatch_out_;
  CombineInput combine_in_;
  CombineOutput combine_out_;

 private:
  // Without the speaker, which is the same everywhere.
  static std::string text(const std::function<void()>& action) {
    const std::string speaker = " [rank 0/2, shm]";
    const auto thrown = thrown_by(action);
    if (!thrown) {
      return "nothing";
    }
    EXPECT_EQ(thrown->code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(thrown->text.ends_with(speaker)) << thrown->text;
    return thrown->text.substr(0, thrown->text.size() - speaker.size());
  }
};

class ValidateExpertStridedTest : public ValidateTest {
 protected:
  ValidateExpertStridedTest() : ValidateTest(Layout::kExpertStrided) {}
};

class ValidateRankMajorTest : public ValidateTest {
 protected:
  ValidateRankMajorTest() : ValidateTest(Layout::kRankMajor) {}
};

TEST_F(ValidateTest, AcceptsWhatIsGood) {
  EXPECT_EQ(dispatch(), "nothing");
  EXPECT_EQ(combine(), "nothing");
  dispatch_in_.weights = {};
  dispatch_out_.weights = {};
  dispatch_in_.scales = {};
  dispatch_out_.scales = {};
  dispatch_out_.sources = {};
  dispatch_out_.counts = {};
  dispatch_out_.count_sums = {};
  EXPECT_EQ(dispatch(), "nothing");
}

TEST_F(ValidateTest, RefusesAPlanOfAnotherExchange) {
  plan_.exchange_id = kExchange + 1;
  const std::string text =
      "plan belongs to another exchange (expected one that this exchange made)";
  EXPECT_EQ(dispatch(), "dispatch: " + text);
  EXPECT_EQ(combine(), "combine: " + text);
}

TEST_F(ValidateTest, RefusesAPlanFromAFile) {
  plan_.exchange_id = 0;
  EXPECT_EQ(
      dispatch(),
      "dispatch: plan belongs to no exchange: it was loaded from a file or built alone (expected "
      "one that this exchange made)"
  );
}

TEST_F(ValidateTest, RefusesAMissingTensor) {
  dispatch_in_.x = {};
  EXPECT_EQ(dispatch(), "dispatch: x is missing");
  combine_in_.rows = {};
  EXPECT_EQ(combine(), "combine: rows is missing");
}

TEST_F(ValidateTest, RefusesAMissingOutput) {
  dispatch_out_.rows = {};
  EXPECT_EQ(dispatch(), "dispatch: rows is missing");
  combine_out_.x = {};
  EXPECT_EQ(combine(), "combine: x is missing");
}

TEST_F(ValidateTest, RefusesAnotherDevice) {
  dispatch_in_.x.device = {Device::Kind::kCuda, 1};
  EXPECT_EQ(dispatch(), "dispatch: x is on cuda 1 (the exchange is on cpu)");
  combine_out_.x.device = {Device::Kind::kCuda, 0};
  EXPECT_EQ(combine(), "combine: x is on cuda 0 (the exchange is on cpu)");
}

TEST_F(ValidateTest, RefusesADtypeThatCannotTravel) {
  dispatch_in_.x.dtype = DType::kInt32;
  EXPECT_EQ(
      dispatch(), "dispatch: x has dtype int32 (expected bfloat16 or float16 or float32 or byte)"
  );
  combine_in_.rows.dtype = DType::kByte;
  EXPECT_EQ(combine(), "combine: rows has dtype byte (expected bfloat16 or float16 or float32)");
}

TEST_F(ValidateTest, RefusesAnOutputOfAnotherDtype) {
  dispatch_out_.rows.dtype = DType::kBFloat16;
  EXPECT_EQ(dispatch(), "dispatch: rows has dtype bfloat16 (expected float32)");
  combine_out_.x.dtype = DType::kFloat16;
  EXPECT_EQ(combine(), "combine: x has dtype float16 (expected float32)");
  dispatch_out_.rows.dtype = DType::kFloat32;
  dispatch_in_.weights.dtype = DType::kBFloat16;
  EXPECT_EQ(dispatch(), "dispatch: input weights has dtype bfloat16 (expected float32)");
}

TEST_F(ValidateTest, RefusesAnotherNumberOfTokens) {
  dispatch_in_.x.rows = 11;
  EXPECT_EQ(dispatch(), "dispatch: x has shape [11, 32] (expected [10, 32])");
  combine_out_.x.rows = 9;
  EXPECT_EQ(combine(), "combine: x has shape [9, 32] (expected [10, 32])");
}

TEST_F(ValidateTest, RefusesAnotherNumberOfRows) {
  dispatch_out_.rows.rows -= 1;
  EXPECT_EQ(
      dispatch(),
      "dispatch: rows has shape [" + std::to_string(plan_.num_rows - 1) + ", 32] (expected [" +
          num_rows_ + ", 32])"
  );
  combine_in_.rows.rows = 0;
  EXPECT_EQ(combine(), "combine: rows has shape [0, 32] (expected [" + num_rows_ + ", 32])");
}

TEST_F(ValidateTest, RefusesAnotherHiddenSize) {
  dispatch_in_.x.cols = 28;
  EXPECT_EQ(dispatch(), "dispatch: x has shape [10, 28] (expected [10, 32])");
  combine_in_.rows.cols = 64;
  EXPECT_EQ(
      combine(),
      "combine: rows has shape [" + num_rows_ + ", 64] (expected [" + num_rows_ + ", 32])"
  );
}

TEST_F(ValidateTest, RefusesRowsWhoseBytesAreNoMultipleOfSixteen) {
  config_.hidden = 30;
  dispatch_in_.x.cols = 30;
  EXPECT_EQ(dispatch(), "dispatch: x has rows of 120 bytes (expected a positive multiple of 16)");
  dispatch_in_.x.dtype = DType::kByte;
  dispatch_in_.x.cols = 0;
  EXPECT_EQ(dispatch(), "dispatch: x has rows of 0 bytes (expected a positive multiple of 16)");
}

TEST_F(ValidateTest, RefusesRowsWithGaps) {
  dispatch_in_.x.row_stride = 40;
  EXPECT_EQ(dispatch(), "dispatch: x has row stride 40 (expected 32: rows must be adjacent)");
  combine_in_.rows.row_stride = 33;
  EXPECT_EQ(combine(), "combine: rows has row stride 33 (expected 32: rows must be adjacent)");
}

TEST_F(ValidateTest, RefusesANullPointer) {
  dispatch_in_.x.data = nullptr;
  EXPECT_EQ(dispatch(), "dispatch: x has a null pointer (shape [10, 32])");
}

TEST_F(ValidateTest, RefusesAnOutputThatOverlapsTheInput) {
  dispatch_out_.rows.data = const_cast<std::byte*>(dispatch_in_.x.data) + 64;
  EXPECT_EQ(dispatch(), "dispatch: rows overlaps x");
  combine_out_.x.data = const_cast<std::byte*>(combine_in_.rows.data);
  EXPECT_EQ(combine(), "combine: x overlaps rows");
}

TEST_F(ValidateTest, RefusesWeightsInOneDirectionOnly) {
  dispatch_out_.weights = {};
  EXPECT_EQ(
      dispatch(),
      "dispatch: output weights is missing while input weights is given (give both or neither)"
  );
  combine_in_.weights = {};
  EXPECT_EQ(
      combine(),
      "combine: output weights is given while input weights is missing (give both or neither)"
  );
}

TEST_F(ValidateTest, RefusesWeightsOfAnotherShape) {
  dispatch_in_.weights.cols = 3;
  EXPECT_EQ(dispatch(), "dispatch: input weights has shape [10, 3] (expected [10, 2])");
  combine_in_.weights.cols = 2;
  EXPECT_EQ(
      combine(),
      "combine: input weights has shape [" + num_rows_ + ", 2] (expected [" + num_rows_ + ", 1])"
  );
}

TEST_F(ValidateTest, RefusesScalesOfAnotherShape) {
  dispatch_out_.scales.cols = 5;
  EXPECT_EQ(
      dispatch(),
      "dispatch: output scales has shape [" + num_rows_ + ", 5] (expected [" + num_rows_ + ", 4])"
  );
  dispatch_in_.scales.rows = 2;
  EXPECT_EQ(dispatch(), "dispatch: input scales has shape [2, 4] (expected [10, 4])");
  dispatch_out_.scales = {};
  EXPECT_EQ(
      dispatch(),
      "dispatch: output scales is missing while input scales is given (give both or neither)"
  );
}

TEST_F(ValidateTest, RefusesSourcesOfAnotherShape) {
  dispatch_out_.sources.cols = 3;
  EXPECT_EQ(
      dispatch(),
      "dispatch: sources has shape [" + num_rows_ + ", 3] (expected [" + num_rows_ + ", 2])"
  );
  dispatch_out_.sources.cols = 2;
  dispatch_out_.sources.dtype = DType::kInt64;
  EXPECT_EQ(dispatch(), "dispatch: sources has dtype int64 (expected int32)");
}

TEST_F(ValidateTest, RefusesExpertsOfRowsThatHaveOne) {
  std::vector<int64_t> experts(1);
  dispatch_out_.experts = matrix(experts.data(), 1, 1);
  EXPECT_EQ(
      dispatch(),
      "dispatch: experts of rows with expert_major (whose rows belong to one expert each)"
  );
}

TEST_F(ValidateRankMajorTest, RefusesExpertsOfAnotherShape) {
  dispatch_out_.counts = dispatch_out_.count_sums = {};
  std::vector<int64_t> experts(1);
  dispatch_out_.experts = matrix(experts.data(), 1, 1);
  const std::string topk = std::to_string(plan_.shape.topk);
  EXPECT_EQ(
      dispatch(), "dispatch: experts has shape [1, 1] (expected [" + num_rows_ + ", " + topk + "])"
  );
  dispatch_out_.experts = dispatch_out_.sources;
  EXPECT_EQ(dispatch(), "dispatch: experts has dtype int32 (expected int64)");
}

TEST_F(ValidateTest, RefusesCountsOfAnotherShape) {
  dispatch_out_.counts.cols = 8;
  EXPECT_EQ(dispatch(), "dispatch: counts has shape [1, 8] (expected [1, 4])");
  dispatch_out_.counts = {};
  dispatch_out_.count_sums.rows = 4;
  EXPECT_EQ(dispatch(), "dispatch: count_sums has shape [4, 4] (expected [1, 4])");
  dispatch_out_.count_sums.rows = 1;
  dispatch_out_.count_sums.dtype = DType::kFloat32;
  EXPECT_EQ(dispatch(), "dispatch: count_sums has dtype float32 (expected int32)");
}

TEST_F(ValidateTest, RefusesScalesByColumnInOneBlock) {
  dispatch_out_.scale_layout = ScaleLayout::kByColumn;
  EXPECT_EQ(
      dispatch(),
      "dispatch: scales by column, of 4 bytes a row with expert_major (expected a multiple of 4 "
      "with expert_strided)"
  );
}

TEST_F(ValidateExpertStridedTest, RefusesScalesByColumnThatAreNotWords) {
  EXPECT_EQ(dispatch_out_.scale_layout, ScaleLayout::kByColumn);
  EXPECT_EQ(dispatch(), "nothing");
  dispatch_in_.scales.cols = 3;
  dispatch_out_.scales.cols = 3;
  EXPECT_EQ(
      dispatch(),
      "dispatch: scales by column, of 3 bytes a row with expert_strided (expected a multiple of 4 "
      "with expert_strided)"
  );
}

TEST_F(ValidateExpertStridedTest, WantsRowsOfScalesInWholeTiles) {
  dispatch_out_.scale_layout = ScaleLayout::kInTiles;
  const int64_t num_experts = plan_.shape.num_local_experts();
  const std::string rows = std::to_string(num_experts * 128);  // blocks are shorter than a tile
  EXPECT_EQ(
      dispatch(),
      "dispatch: output scales has shape [" + num_rows_ + ", 4] (expected [" + rows + ", 4])"
  );
  const Matrix scales(DType::kByte, num_experts * 128, 4);
  dispatch_out_.scales.data = const_cast<std::byte*>(scales.view().data);
  dispatch_out_.scales.rows = num_experts * 128;
  EXPECT_EQ(dispatch(), "nothing");
  dispatch_in_.scales.cols = 3;
  dispatch_out_.scales.cols = 3;
  EXPECT_EQ(
      dispatch(),
      "dispatch: scales in tiles, of 3 bytes a row with expert_strided (expected a multiple of 4 "
      "with expert_strided)"
  );
}

class ValidateQuantiseTest : public ValidateTest {
 protected:
  ValidateQuantiseTest() {
    config_.hidden = 256;
    x_ = Matrix(DType::kBFloat16, plan_.shape.num_tokens, 256);
    rows_ = Matrix(DType::kByte, plan_.num_rows, 256);
    scales_ = Matrix(DType::kFloat32, plan_.num_rows, 2);
    dispatch_in_ = {.x = x_.view(), .quantise = Quantise::kE4M3};
    dispatch_out_ = {.rows = rows_.view(), .scales = scales_.view()};
  }

  Matrix x_;
  Matrix rows_;
  Matrix scales_;
};

TEST_F(ValidateQuantiseTest, WantsTheScalesOfTheRule) {
  for (const ScaleRule rule : {ScaleRule::kExact, ScaleRule::kClamped, ScaleRule::kPowerOfTwo}) {
    dispatch_in_.scale_rule = rule;
    EXPECT_EQ(dispatch(), "nothing");
  }
  dispatch_in_.scale_rule = ScaleRule::kUe8m0;
  EXPECT_EQ(dispatch(), "dispatch: output scales has dtype float32 (expected byte)");
  dispatch_out_.scales.dtype = DType::kByte;
  EXPECT_EQ(dispatch(), "nothing");
  dispatch_in_.scale_rule = ScaleRule::kClamped;
  EXPECT_EQ(dispatch(), "dispatch: output scales has dtype byte (expected float32)");
}

TEST_F(ValidateQuantiseTest, RefusesARuleThatIsUnknown) {
  dispatch_in_.scale_rule = static_cast<ScaleRule>(4);
  EXPECT_EQ(dispatch(), "dispatch: scale_rule = 4 is unknown (0 to 3)");
  dispatch_in_.quantise = static_cast<Quantise>(5);
  EXPECT_EQ(dispatch(), "dispatch: quantise = 5 is unknown (0 to 4)");
}

TEST_F(ValidateQuantiseTest, WantsRowsAndScalesOfEachFormat) {
  const Matrix bytes(DType::kByte, plan_.num_rows, 256);
  dispatch_out_.scales.data = const_cast<std::byte*>(bytes.view().data);
  dispatch_out_.scales.dtype = DType::kByte;
  dispatch_out_.scales.cols = 8;
  dispatch_in_.quantise = Quantise::kMxfp8;
  EXPECT_EQ(dispatch(), "nothing");
  dispatch_in_.scale_rule = ScaleRule::kUe8m0;
  EXPECT_EQ(dispatch(), "dispatch: scale_rule = 3 with MXFP8 (which has exact alone)");
  dispatch_in_.quantise = Quantise::kNvfp4;
  EXPECT_EQ(
      dispatch(),
      "dispatch: output scales has shape [" + num_rows_ + ", 8] (expected [" + num_rows_ + ", 16])"
  );
  dispatch_out_.scales.cols = 16;
  EXPECT_EQ(
      dispatch(),
      "dispatch: rows has shape [" + num_rows_ + ", 256] (expected [" + num_rows_ + ", 128])"
  );
  dispatch_out_.rows.cols = 128;
  dispatch_out_.rows.row_stride = 128;
  EXPECT_EQ(dispatch(), "nothing");
  dispatch_in_.scale_rule = ScaleRule::kClamped;
  EXPECT_EQ(dispatch(), "dispatch: scale_rule = 1 with NVFP4 (which has exact and ue8m0)");
}

TEST_F(ValidateQuantiseTest, TakesTheGlobalScaleOfNvfp4Alone) {
  float scale = 1;
  dispatch_in_.global_scale = matrix(&std::as_const(scale), 1, 1);
  EXPECT_EQ(dispatch(), "dispatch: global_scale is given (which NVFP4 alone has)");
  dispatch_in_.quantise = Quantise::kNvfp4;
  dispatch_in_.global_scale.rows = 0;
  EXPECT_EQ(dispatch(), "dispatch: global_scale has shape [0, 1] (expected [1, 1])");
  dispatch_in_.global_scale.rows = 1;
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {0.0F, -0.0F, -2.5F, infinity, infinity - infinity}) {
    scale = bad;
    EXPECT_EQ(
        dispatch(),
        fmt::format("dispatch: global_scale = {} (expected more than 0, and finite)", bad)
    );
  }
  for (const float good : {0x1p-149F, std::numeric_limits<float>::max()}) {
    scale = good;
    EXPECT_EQ(dispatch().find("global_scale"), std::string::npos) << good;
  }
}

class ValidateWireTest : public ValidateTest {
 protected:
  ValidateWireTest() {
    config_.hidden = 256;
    rows_ = Matrix(DType::kBFloat16, plan_.num_rows, 256);
    x_ = Matrix(DType::kBFloat16, plan_.shape.num_tokens, 256);
    combine_in_ = {.rows = rows_.view(), .wire = Wire::kFp8};
    combine_out_ = {.x = x_.view()};
  }

  Matrix rows_;
  Matrix x_;
};

TEST_F(ValidateWireTest, IsForWholeGroupsOfBf16) {
  EXPECT_EQ(combine(), "nothing");
  combine_in_.wire = Wire::kLogFmt10;
  EXPECT_EQ(combine(), "nothing");
  for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
    rows_ = Matrix(dtype, plan_.num_rows, 256);
    x_ = Matrix(dtype, plan_.shape.num_tokens, 256);
    combine_in_.rows = rows_.view();
    combine_out_.x = x_.view();
    EXPECT_EQ(
        combine(),
        "combine: wire of " + std::string(dtype_name(dtype)) +
            " rows of 256 elements (bfloat16 and a multiple of 128)"
    );
  }
  config_.hidden = 64;
  rows_ = Matrix(DType::kBFloat16, plan_.num_rows, 64);
  x_ = Matrix(DType::kBFloat16, plan_.shape.num_tokens, 64);
  combine_in_.rows = rows_.view();
  combine_out_.x = x_.view();
  EXPECT_EQ(
      combine(), "combine: wire of bfloat16 rows of 64 elements (bfloat16 and a multiple of 128)"
  );
}

TEST_F(ValidateWireTest, RefusesSumsByChoiceAndWhatIsUnknown) {
  plan_.shape.options.order = SumOrder::kTopk;
  EXPECT_EQ(
      combine(), "combine: wire with a plan of order topk (expected rank, where sums travel)"
  );
  combine_in_.wire = static_cast<Wire>(3);
  EXPECT_EQ(combine(), "combine: wire = 3 is unknown (0 to 2)");
}

TEST_F(ValidateTest, RefusesPlanWeightsThatAreNotThere) {
  combine_in_.scale = CombineScale::kPlanWeights;
  EXPECT_EQ(combine(), "nothing");
  plan_.shape.has_weights = false;
  EXPECT_EQ(combine(), "combine: scale asks for the plan's weights (the plan's routing had none)");
}

TEST_F(ValidateTest, RefusesSourceWeightsThatDoNotFitTheScale) {
  combine_in_.scale = CombineScale::kSourceWeights;
  EXPECT_EQ(combine(), "combine: source_weights is missing (scale needs it)");
  combine_in_.source_weights = dispatch_in_.weights;
  EXPECT_EQ(combine(), "nothing");
  combine_in_.source_weights.rows = 4;
  EXPECT_EQ(combine(), "combine: source_weights has shape [4, 2] (expected [10, 2])");
  combine_in_.scale = CombineScale::kNone;
  EXPECT_EQ(combine(), "combine: source_weights is given (scale does not use it)");
}

TEST_F(ValidateTest, RefusesIndicesBesideNoSourceWeights) {
  combine_in_.source_idx = std::as_const(data_.routing[0].topk_idx).view();
  EXPECT_EQ(combine(), "combine: source_idx is given (scale does not use it)");
  combine_in_.scale = CombineScale::kSourceWeights;
  combine_in_.source_weights = dispatch_in_.weights;
  EXPECT_EQ(combine(), "nothing");
  combine_in_.source_idx.cols = 3;
  EXPECT_EQ(combine(), "combine: source_idx has shape [10, 3] (expected [10, 2])");
}

TEST_F(ValidateRankMajorTest, RefusesScalesByColumn) {
  dispatch_out_.scale_layout = ScaleLayout::kByColumn;
  EXPECT_EQ(
      dispatch(),
      "dispatch: scales by column, of 4 bytes a row with rank_major (expected a multiple of 4 with "
      "expert_strided)"
  );
}

TEST_F(ValidateRankMajorTest, RefusesToScaleRowsOfSeveralRoutes) {
  EXPECT_EQ(dispatch(), "nothing");
  EXPECT_EQ(combine(), "nothing");
  combine_in_.scale = CombineScale::kPlanWeights;
  EXPECT_EQ(
      combine(),
      "combine: rows cannot be scaled in layout rank_major (a row belongs to several routes)"
  );
}

}  // namespace
}  // namespace weft::test
