// SPDX-License-Identifier: Apache-2.0
// Records that are written can be read, also after a crash.
#include "plan/file/routing_file.hpp"

#include "unit/plan/routing_file_fixture.hpp"

namespace weft {
namespace {

using testing::kShape;
using testing::message_of;
using Mode = RoutingFileWriter::Mode;
using Tail = RoutingFileReader::Tail;
using RoutingFileTest = testing::RoutingFileFixture;

TEST_F(RoutingFileTest, ReturnsEveryRecordInAnyOrder) {
  write(5);
  RoutingFileReader reader(path_);
  EXPECT_EQ(reader.shape(), kShape);
  ASSERT_EQ(reader.num_records(), 5);
  for (const int i : {4, 0, 2, 2, 1, 3}) {
    const RoutingRecord record = reader.read(i);
    const std::vector<RouteTable> expected = routes(static_cast<uint64_t>(i));
    EXPECT_EQ(record.step, 10 * i);
    EXPECT_EQ(record.layer, i % 3);
    ASSERT_EQ(record.routes.size(), 2U);
    for (size_t rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(record.routes[rank].num_tokens, expected[rank].num_tokens);
      EXPECT_EQ(record.routes[rank].topk, 2);
      EXPECT_EQ(record.routes[rank].expert, expected[rank].expert);
    }
  }
}

TEST_F(RoutingFileTest, HoldsMoreExpertsThanTwoBytesCan) {
  const RoutingFileShape wide = {.num_ranks = 2, .num_experts = 100000, .topk = 2};
  const std::vector<RouteTable> expected = routes(1, wide.num_experts);
  RoutingFileWriter(path_, wide).append(-1, 0, expected);
  RoutingFileReader reader(path_);
  EXPECT_EQ(reader.read(0).step, -1);
  EXPECT_EQ(reader.read(0).routes[0].expert, expected[0].expert);
}

TEST_F(RoutingFileTest, HoldsRanksWithoutTokens) {
  const std::vector<RouteTable> none(2, testing::table_of(2, {}));
  RoutingFileWriter(path_, kShape).append(0, 0, none);
  RoutingFileReader reader(path_);
  EXPECT_EQ(reader.read(0).routes[1].num_tokens, 0);
}

TEST_F(RoutingFileTest, IsReadableWithoutRecords) {
  write(0);
  EXPECT_EQ(RoutingFileReader(path_).num_records(), 0);
}

TEST_F(RoutingFileTest, LooksAsDocumented) {
  write(1);
  const std::string file = bytes();
  EXPECT_EQ(file.substr(0, 8), "WEFTROUT");
  EXPECT_EQ(file.substr(8, 4), std::string("\1\0\0\0", 4));
  EXPECT_EQ(file.substr(32, 4), "WREC");
  EXPECT_EQ(file.size(), 32U + 32 + 16 + 16);
}

TEST_F(RoutingFileTest, ReadsEarlierRecordsWhereverALaterOneWasTorn) {
  write(3);
  const std::string whole = bytes();
  for (size_t size = 32 + 128 + 1; size < whole.size(); ++size) {
    rewrite(whole.substr(0, size));
    RoutingFileReader reader(path_, Tail::kIgnore);
    ASSERT_EQ(reader.num_records(), 2);
    ASSERT_EQ(reader.read(1).step, 10);
    ASSERT_NE(reader.tail_fault(), "");
    ASSERT_NE(refusal(), "nothing");
  }
}

TEST_F(RoutingFileTest, ContinuesBehindTheLastWholeRecord) {
  write(2);
  rewrite(bytes() + "torn");
  write(1, Mode::kContinue);
  RoutingFileReader reader(path_);
  ASSERT_EQ(reader.num_records(), 3);
  EXPECT_EQ(reader.read(1).step, 10);
  EXPECT_EQ(reader.read(2).step, 0);
}

TEST_F(RoutingFileTest, BeginsANewFileWhereThereIsNothingToContinue) {
  write(1, Mode::kContinue);
  EXPECT_EQ(RoutingFileReader(path_).num_records(), 1);
}

TEST_F(RoutingFileTest, ReplacesAnOldFile) {
  write(4);
  write(1);
  EXPECT_EQ(RoutingFileReader(path_).num_records(), 1);
}

TEST_F(RoutingFileTest, RefusesToContinueAFileOfAnotherShape) {
  write(1);
  const RoutingFileShape other = {.num_ranks = 4, .num_experts = 8, .topk = 2};
  EXPECT_EQ(
      message_of([&] { RoutingFileWriter(path_, other, Mode::kContinue); }),
      fmt::format(
          "save routing: {}: holds 2 ranks, 8 experts, topk = 2 (expected 4 ranks, 8 experts, topk "
          "= 2)",
          path_
      )
  );
}

TEST(Crc32Test, GivesThePublishedCheckValue) {
  const std::string_view digits = "123456789";
  EXPECT_EQ(crc32(std::as_bytes(std::span(digits))), 0xcbf43926U);
}

}  // namespace
}  // namespace weft
