// SPDX-License-Identifier: Apache-2.0
// Cases that go wrong first, by name, each in every world and with every layout.
#include <gtest/gtest.h>

#include "multirank/worlds.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

using Parameters = std::tuple<std::string, Layout>;

class HardCaseTest : public testing::TestWithParam<Parameters> {
 protected:
  HardCaseTest() {
    spec_.layout = std::get<1>(GetParam());
    spec_.seed = 77;
    use_ranks(3);
  }

  void SetUp() override {
    const std::string reason = obstacle(std::get<0>(GetParam()));
    if (!reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }
  void use_ranks(int num_ranks) {
    setup_.num_ranks = num_ranks;
    setup_.num_experts = 4 * num_ranks;
    spec_.num_tokens.assign(static_cast<size_t>(num_ranks), 40);
  }
  [[nodiscard]] bool is_rank_major() const { return spec_.layout == Layout::kRankMajor; }
  [[nodiscard]] std::vector<ExchangeSetup> setups() const {
    return in_world(std::get<0>(GetParam()), setup_);
  }
  void expect_reference_bits() {
    for (const ExchangeSetup& setup : setups()) {
      EXPECT_EQ(run_on_threads(setup, spec_), "");
    }
  }

  ExchangeSetup setup_;
  Case spec_;
};

// Rows of rank_major belong to several routes and cannot be weighed.
class WeightedCombineTest : public HardCaseTest {};

TEST_P(HardCaseTest, MakesFp8OfItsRows) {
  setup_.hidden = 256;
  spec_.dtype = DType::kBFloat16;
  spec_.pad_multiple = is_rank_major() ? 1 : 8;
  for (const Quantise kind : {Quantise::kE4M3, Quantise::kE5M2}) {
    for (const OutputMemory output : {OutputMemory::kDirect, OutputMemory::kStaged}) {
      spec_.quantise = kind;
      spec_.output = output;
      expect_reference_bits();
    }
  }
}

TEST_P(HardCaseTest, MakesFp8ByEveryRuleForScales) {
  setup_.hidden = 512;
  spec_.calls = "d";
  spec_.dtype = DType::kBFloat16;
  spec_.pad_multiple = is_rank_major() ? 1 : 8;
  spec_.asks_beside = true;  // by column with expert_strided
  for (const Quantise kind : {Quantise::kE4M3, Quantise::kE5M2}) {
    for (const ScaleRule rule : {ScaleRule::kClamped, ScaleRule::kPowerOfTwo, ScaleRule::kUe8m0}) {
      spec_.quantise = kind;
      spec_.scale_rule = rule;
      expect_reference_bits();
    }
  }
}

TEST_P(HardCaseTest, MakesBlockFormatsOfItsRows) {
  spec_.dtype = DType::kBFloat16;
  spec_.calls = "d";
  spec_.pad_multiple = is_rank_major() ? 1 : 8;
  for (const int64_t hidden : {32, 416, 512}) {
    for (const Quantise kind : {Quantise::kMxfp8, Quantise::kNvfp4}) {
      for (const OutputMemory output : {OutputMemory::kDirect, OutputMemory::kStaged}) {
        setup_.hidden = hidden;
        spec_.quantise = kind;
        spec_.global_scale = hidden == 416 ? 0.0F : 2688 / 0x1p20F;
        spec_.output = output;
        expect_reference_bits();
      }
    }
  }
  spec_.scale_rule = ScaleRule::kUe8m0;  // of NVFP4
  expect_reference_bits();
}

// With expert_strided, and in plan and dispatch of one call, too.
TEST_P(HardCaseTest, LaysScalesByColumnAndInTiles) {
  setup_.hidden = 384;
  spec_.calls = "dd";
  spec_.dtype = DType::kBFloat16;
  spec_.pad_multiple = is_rank_major() ? 1 : 8;
  spec_.room = Room::kSpare;
  spec_.asks_beside = true;
  for (const ScaleLayout layout : {ScaleLayout::kByColumn, ScaleLayout::kInTiles}) {
    for (const Quantise kind : {Quantise::kE4M3, Quantise::kMxfp8, Quantise::kNvfp4}) {
      for (const bool is_routed : {false, true}) {
        spec_.scale_layout = layout;
        spec_.quantise = kind;
        spec_.is_routed = is_routed;
        expect_reference_bits();
      }
    }
  }
}

TEST_P(HardCaseTest, TellsWhereRowsComeFromAndHowManyThereAre) {
  spec_.topk = 4;
  spec_.repeat_experts = true;
  spec_.scale_cols = 12;
  spec_.pad_multiple = is_rank_major() ? 1 : 8;
  spec_.asks_beside = true;
  for (const Room room : {Room::kExact, Room::kSpare, Room::kOneRowShort, Room::kRandom}) {
    for (const bool is_routed : {false, true}) {
      spec_.room = room;
      spec_.is_routed = is_routed;
      expect_reference_bits();
    }
  }
}

TEST_P(HardCaseTest, IgnoresExpertsThatAreUnknownIfAsked) {
  spec_.topk = 4;
  spec_.hole_fraction = 0.4;
  spec_.ignores_unknown = true;
  for (const IndexKind index : {IndexKind::kInt64, IndexKind::kInt32}) {
    for (const bool is_routed : {false, true}) {
      spec_.index = index;
      spec_.is_routed = is_routed;
      spec_.room = is_routed ? Room::kSpare : Room::kExact;
      expect_reference_bits();
    }
  }
}

TEST_P(HardCaseTest, SendsAllTokensToOneExpert) {
  spec_.popularity = Popularity::kOneExpert;
  spec_.repeat_experts = true;
  expect_reference_bits();
}

TEST_P(HardCaseTest, WorksWithoutTokensOnSomeRanks) {
  spec_.num_tokens = {0, 64, 0};
  expect_reference_bits();
}

TEST_P(HardCaseTest, WorksWithoutAnyToken) {
  spec_.num_tokens = {0, 0, 0};
  expect_reference_bits();
}

TEST_P(HardCaseTest, WorksWithoutRowsOnARank) {
  spec_.experts = {0, 11};  // rank 1 gets nothing
  expect_reference_bits();
}

TEST_P(HardCaseTest, SkipsHolesInAnyPlace) {
  spec_.topk = 4;
  spec_.hole_fraction = 0.6;
  expect_reference_bits();
}

TEST_P(HardCaseTest, WorksWhenEveryRouteIsAHole) {
  spec_.experts = {-1, -1};
  expect_reference_bits();
}

TEST_P(HardCaseTest, TreatsARepeatedExpertAsTwoRoutes) {
  spec_.topk = 4;
  spec_.experts = {5, 1, 5, 5};
  expect_reference_bits();
}

TEST_P(HardCaseTest, DropsOneRowBeyondTheBudget) {
  spec_.room = Room::kOneRowShort;
  expect_reference_bits();
}

TEST_P(HardCaseTest, LeavesSlackUntouched) {
  spec_.room = Room::kSpare;
  spec_.pad_multiple = is_rank_major() ? 1 : 16;
  expect_reference_bits();
}

TEST_P(HardCaseTest, TakesOneExpertPerToken) {
  spec_.topk = 1;
  expect_reference_bits();
}

TEST_P(HardCaseTest, TakesThirtyTwoExpertsPerToken) {
  setup_.max_topk = 32;
  setup_.num_experts = 36;
  spec_.topk = 32;
  expect_reference_bits();
}

TEST_P(HardCaseTest, TakesManyTokensInManyChunks) {
  setup_.max_tokens = 300;
  setup_.num_threads = 2;
  spec_.num_tokens = {300, 1, 257};
  expect_reference_bits();
}

TEST_P(HardCaseTest, TakesRowsAtEveryMultipleOfSixteenBytes) {
  for (const int64_t row_bytes : {16, 48, 64, 4096 + 16}) {
    setup_.hidden = row_bytes / dtype_bytes(spec_.dtype);
    expect_reference_bits();
  }
}

TEST_P(HardCaseTest, TakesOneTokenHereAndManyThere) {
  spec_.num_tokens = {1, 64, 33};
  expect_reference_bits();
}

TEST_P(HardCaseTest, TakesAMapAsWellAsIndices) {
  spec_.index = IndexKind::kMap;
  spec_.topk = 3;
  expect_reference_bits();
}

TEST_P(HardCaseTest, WaitsForRanksThatEnterLate) {
  spec_.is_late = true;
  spec_.calls = "dcdc";
  expect_reference_bits();
}

TEST_P(HardCaseTest, ServesTheBackwardOfBothDirections) {
  spec_.calls = "dcdc";  // forward: d c; backward of combine: d; backward of dispatch: c
  expect_reference_bits();
}

TEST_P(HardCaseTest, TakesScaleRowsOfOddSizes) {
  for (const int64_t cols : {1, 4, 56}) {
    spec_.calls = "d";
    spec_.dtype = DType::kByte;
    spec_.scale_cols = cols;
    spec_.output = OutputMemory::kMixed;
    expect_reference_bits();
  }
}

TEST_P(HardCaseTest, TakesDirectStagedAndMixedOutputs) {
  spec_.scale_cols = 12;
  for (const OutputMemory output :
       {OutputMemory::kDirect, OutputMemory::kStaged, OutputMemory::kMixed}) {
    spec_.output = output;
    expect_reference_bits();
  }
}

TEST_P(WeightedCombineTest, WeighsRowsByThePlanAndByTheSource) {
  spec_.topk = 4;
  for (const CombineScale scale : {CombineScale::kPlanWeights, CombineScale::kSourceWeights}) {
    for (const IndexKind index : {IndexKind::kInt32, IndexKind::kMap}) {
      spec_.scale = scale;
      spec_.index = index;
      expect_reference_bits();
    }
  }
}

TEST_P(WeightedCombineTest, LeavesOutWeightsWhoseIndexIsNegative) {
  spec_.topk = 4;
  spec_.scale = CombineScale::kSourceWeights;
  spec_.skips_source_weights = true;
  expect_reference_bits();
}

TEST_P(HardCaseTest, KeepsSeveralPlansAliveOutOfOrder) {
  for (const ExchangeSetup& setup : setups()) {
    std::vector<CaseData> cases;
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      spec_.seed = seed;
      spec_.pad_multiple = is_rank_major() ? 1 : static_cast<int64_t>(seed);
      cases.push_back(make_case_data(setup, spec_));
    }
    EXPECT_EQ(run_cases_on_threads(cases), "");
  }
}

std::string test_name(const testing::TestParamInfo<Parameters>& info) {
  return std::get<0>(info.param) + "_" + std::string(layout_name(std::get<1>(info.param)));
}

INSTANTIATE_TEST_SUITE_P(
    All,
    HardCaseTest,
    testing::Combine(
        testing::ValuesIn(worlds()),
        testing::Values(Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided)
    ),
    test_name
);

INSTANTIATE_TEST_SUITE_P(
    All,
    WeightedCombineTest,
    testing::Combine(
        testing::ValuesIn(worlds()), testing::Values(Layout::kExpertMajor, Layout::kExpertStrided)
    ),
    test_name
);

}  // namespace
}  // namespace weft::test
