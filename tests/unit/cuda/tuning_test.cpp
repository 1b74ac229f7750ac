// SPDX-License-Identifier: Apache-2.0
#include "cuda/exchange/tuning.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <unistd.h>

#include "support/errors.hpp"

namespace weft {
namespace {

using test::text_of;
using test::thrown_by;

std::pair<int, int> blocks(const std::vector<TunedSplit>& table, const CallSize& size) {
  const RoleBlocks chosen = choose_blocks(table, size);
  return {chosen.first, chosen.second};
}

TEST(TuningTest, TakesTheFastestSplitThatFits) {
  const std::vector<TunedSplit> table = {
      {Op::kDispatch, 4, 4096, {12, 12}, 300},
      {Op::kDispatch, 4, 4096, {10, 14}, 310},
      {Op::kDispatch, 4, 4096, {48, 48}, 200},
      {Op::kCombine, 4, 4096, {4, 4}, 100}};
  EXPECT_EQ(blocks(table, {Op::kDispatch, 4, 4096, 24}), std::pair(12, 12));
  EXPECT_EQ(blocks(table, {Op::kDispatch, 4, 4096, 23}), std::pair(13, 10));  // by rule
  EXPECT_EQ(blocks(table, {Op::kDispatch, 4, 4096, 95}), std::pair(12, 12));
  EXPECT_EQ(blocks(table, {Op::kDispatch, 4, 4096, 96}), std::pair(48, 48));
  EXPECT_EQ(blocks(table, {Op::kCombine, 4, 4096, 96}), std::pair(4, 4));
}

// Rows of rank_major are not added before they return, so that fewer blocks are needed for that.
TEST(TuningTest, CombinesOfRankMajorRowsHaveSplitsOfTheirOwn) {
  std::vector<TunedSplit> table = {
      {Op::kCombine, 4, 4096, {14, 10}, 500},
      {Op::kDispatch, 4, 4096, {15, 9}, 500},
      {Op::kCombine, 4, 4096, {8, 16}, 450, true}};
  const CallSize of_one_row = {Op::kCombine, 4, 4096, 24, 0, false, true};
  EXPECT_EQ(blocks(table, of_one_row), std::pair(8, 16));
  EXPECT_EQ(blocks(table, {Op::kCombine, 4, 4096, 24}), std::pair(14, 10));
  EXPECT_EQ(useful_splits(table), table);
  table.pop_back();
  EXPECT_EQ(blocks(table, of_one_row), std::pair(14, 10));  // none were measured
}

// With few blocks chance decides where they run.
TEST(TuningTest, TakesTheMostBlocksOfSplitsThatAreAsFast) {
  const std::vector<TunedSplit> table = {
      {Op::kDispatch, 4, 4096, {38, 58}, 485.8},
      {Op::kDispatch, 4, 4096, {40, 92}, 487.6},
      {Op::kDispatch, 4, 4096, {66, 66}, 486.1},
      {Op::kDispatch, 4, 4096, {92, 40}, 496.8},
      {Op::kDispatch, 2, 4096, {99, 33}, 485.8}};
  EXPECT_EQ(blocks(table, {Op::kDispatch, 4, 4096, 132}), std::pair(66, 66));
  EXPECT_EQ(blocks(table, {Op::kDispatch, 4, 4096, 96}), std::pair(38, 58));
}

TEST(TuningTest, RemembersTheLastCallOfEachKindAlone) {
  BlockChoice choice(
      {{Op::kDispatch, 4, 4096, {12, 12}, 300},
       {Op::kDispatch, 4, 4096, {48, 48}, 200},
       {Op::kCombine, 4, 4096, {4, 4}, 100}}
  );
  for (const int sms : {24, 24, 96, 24}) {
    EXPECT_EQ(choice.of({Op::kDispatch, 4, 4096, sms}).first, sms / 2);
    EXPECT_EQ(choice.of({Op::kCombine, 4, 4096, sms}).first, 4);
  }
}

TEST(TuningTest, TakesTheNearestRowBytesAndBeyondTheMeasuredRanksTheNearest) {
  const std::vector<TunedSplit> table = {
      {Op::kDispatch, 2, 4096, {1, 2}, 900},
      {Op::kDispatch, 2, 16384, {2, 2}, 900},
      {Op::kDispatch, 4, 4096, {3, 2}, 100}};
  EXPECT_EQ(blocks(table, {Op::kDispatch, 2, 4096, 24}), std::pair(1, 2));
  EXPECT_EQ(blocks(table, {Op::kDispatch, 2, 14336, 24}), std::pair(2, 2));
  EXPECT_EQ(blocks(table, {Op::kDispatch, 1, 14336, 24}), std::pair(2, 2));
  EXPECT_EQ(blocks(table, {Op::kDispatch, 8, 14336, 24}), std::pair(3, 2));
}

TEST(TuningTest, TakesWhatLiesBetweenTwoMeasuredNumbersOfRanks) {
  const std::vector<TunedSplit> table = {
      {Op::kDispatch, 2, 4096, {10, 40}, 900},
      {Op::kDispatch, 8, 4096, {20, 20}, 900},
      {Op::kDispatch, 8, 4096, {60, 72}, 100}};
  EXPECT_EQ(blocks(table, {Op::kDispatch, 4, 4096, 50}), std::pair(15, 30));
  EXPECT_EQ(blocks(table, {Op::kDispatch, 4, 4096, 132}), std::pair(35, 56));
  EXPECT_EQ(blocks(table, {Op::kDispatch, 4, 4096, 45}), std::pair(20, 20));  // 50 do not fit
  for (int sms = 50; sms <= 132; ++sms) {
    const auto [first, second] = blocks(table, {Op::kDispatch, 3, 4096, sms});
    EXPECT_LE(first + second, sms);
  }
}

TEST(TuningTest, SaysFromWhichNumbersOfRanksASplitComes) {
  const auto ranks = [](int num_ranks, int sms = 132) {
    return measured_ranks(built_in_tuning(), {Op::kDispatch, num_ranks, 4096, sms});
  };
  EXPECT_EQ(ranks(1), (MeasuredRanks{2, 2}));
  EXPECT_EQ(ranks(2), (MeasuredRanks{2, 2}));
  EXPECT_EQ(ranks(3), (MeasuredRanks{2, 4}));
  EXPECT_EQ(ranks(8), (MeasuredRanks{4, 4}));
  EXPECT_EQ(ranks(8, 2), MeasuredRanks{});  // nothing so small was measured
}

TEST(TuningTest, KeepsTheSplitsThatSomeCallWouldTake) {
  const std::vector<TunedSplit> table = {
      {Op::kDispatch, 4, 4096, {12, 12}, 300},
      {Op::kDispatch, 4, 4096, {10, 14}, 310},  // as many, slower
      {Op::kDispatch, 4, 4096, {20, 20}, 302},  // more, as fast
      {Op::kDispatch, 4, 4096, {30, 20}, 350},  // more, slower
      {Op::kDispatch, 4, 8192, {30, 20}, 350}};
  const auto useful = useful_splits(table);
  ASSERT_EQ(useful.size(), 3U);  // the first, the third, the last
  for (int sms = 24; sms < 60; ++sms) {
    const CallSize size = {Op::kDispatch, 4, 4096, sms};
    EXPECT_EQ(blocks(table, size), blocks(useful, size));
  }
}

TEST(TuningTest, SharesByRuleWhereNothingIsMeasuredOrSomethingIsAsked) {
  EXPECT_EQ(blocks({}, {Op::kDispatch, 2, 4096, 20}), std::pair(11, 9));
  EXPECT_EQ(blocks({}, {Op::kDispatch, 2, 4096, 2}), std::pair(1, 1));
  EXPECT_EQ(blocks({}, {Op::kDispatch, 2, 4096, 20, 5}), std::pair(5, 15));
  EXPECT_EQ(blocks({}, {Op::kDispatch, 2, 4096, 20, 0, true}), std::pair(19, 1));
  EXPECT_EQ(blocks({}, {Op::kCombine, 1, 4096, 20, 0, true}), std::pair(1, 19));
}

TEST(TuningTest, AShortCombineSumsAllTokensAtOnceWithinHalfOfTheBlocks) {
  EXPECT_EQ(blocks_of_short_combine(132, 128, 3), (RoleBlocks{89, 43}));
  EXPECT_EQ(blocks_of_short_combine(132, 0, 3), (RoleBlocks{131, 1}));
  EXPECT_EQ(blocks_of_short_combine(132, 198, 3), (RoleBlocks{66, 66}));
  EXPECT_EQ(blocks_of_short_combine(132, 199, 3), std::nullopt);
  EXPECT_EQ(blocks_of_short_combine(2, 1, 1), (RoleBlocks{1, 1}));
}

TEST(TuningTest, TheBuiltInTableHasNothingThatNoCallWouldTake) {
  EXPECT_EQ(useful_splits(built_in_tuning()).size(), built_in_tuning().size());
}

// Each number of GPUs of one host gets a split that fits, within few multiprocessors and all.
TEST(TuningTest, TheBuiltInTableCoversOneToEightRanks) {
  for (const Op op : {Op::kDispatch, Op::kCombine}) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      for (const int sms : {24, 64, 132}) {
        const CallSize size = {op, ranks, 14336, sms};
        EXPECT_NE(measured_ranks(built_in_tuning(), size), MeasuredRanks{});
        const auto [first, second] = blocks(built_in_tuning(), size);
        EXPECT_GE(std::min(first, second), 1);
        EXPECT_LE(first + second, sms);
      }
    }
  }
}

TEST(TuningTest, ReadsAFileAndSaysWhatIsWrongWithIt) {
  const std::string path = testing::TempDir() + "weft_tuning_" + std::to_string(getpid()) + ".json";
  const auto load = [&](const std::string& text) {
    std::ofstream(path) << text;
    return load_tuning(path);
  };
  const std::string good =
      R"({"op": "dispatch", "ranks": 2, "row_bytes": 4096, "senders": 3, "others": 4, "us": 5.5})";
  const std::string of_one_row = R"({"op": "combine", "layout": "rank_major", "ranks": 2, )"
                                 R"("row_bytes": 4096, "senders": 1, "others": 2, "us": 5.5})";
  const auto table = load(R"({"splits": [)" + good + ", " + of_one_row + "]}");
  ASSERT_EQ(table.size(), 2U);
  EXPECT_EQ(table[0].num_ranks, 2);
  EXPECT_FALSE(table[0].one_row);
  EXPECT_TRUE(table[1].one_row);
  EXPECT_EQ(blocks(table, {Op::kDispatch, 2, 4096, 7}), std::pair(3, 4));
  const auto fault = [&](const std::string& text) {
    return text_of(thrown_by([&] { static_cast<void>(load(text)); }));
  };
  EXPECT_NE(fault("{").find(path), std::string::npos);
  EXPECT_NE(
      fault(R"({"splits": [{"op": "dispatch"}]})").find("key 'ranks' not found"), std::string::npos
  );
  std::string none = good;
  none.replace(none.find("\"ranks\": 2"), 10, "\"ranks\": 0");
  EXPECT_NE(
      fault(R"({"splits": [)" + none + "]}")
          .find("ranks, row_bytes, senders and others must be at least 1"),
      std::string::npos
  );
}

}  // namespace
}  // namespace weft
