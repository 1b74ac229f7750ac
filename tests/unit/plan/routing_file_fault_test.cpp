// SPDX-License-Identifier: Apache-2.0
// Every fault of a routing file is named with its byte.
#include <cstring>

#include "plan/file/routing_file.hpp"
#include "unit/plan/routing_file_fixture.hpp"

namespace weft {
namespace {

using testing::kShape;
using testing::message_of;
using RoutingFaultTest = testing::RoutingFileFixture;

TEST_F(RoutingFaultTest, NamesAMissingFile) {
  EXPECT_EQ(refusal(), "No such file or directory (errno 2)");
}

TEST_F(RoutingFaultTest, NamesAFolder) {
  path_ = folder_;
  EXPECT_EQ(refusal(), "Is a directory (errno 21)");
}

TEST_F(RoutingFaultTest, NamesAnEmptyFile) {
  rewrite("");
  EXPECT_EQ(refusal(), "at byte 0: the file is empty (expected a routing file)");
}

TEST_F(RoutingFaultTest, NamesAForeignFile) {
  rewrite("It is a truth universally acknowledged");
  EXPECT_EQ(refusal(), "at byte 0: not a routing file (expected it to begin with \"WEFTROUT\")");
  rewrite("WEFT");
  EXPECT_EQ(refusal(), "at byte 0: not a routing file (expected it to begin with \"WEFTROUT\")");
}

TEST_F(RoutingFaultTest, NamesAnotherVersion) {
  write(1);
  std::string file = bytes();
  file[8] = 9;
  rewrite(file);
  EXPECT_EQ(refusal(), "at byte 8: version 9 (expected 1)");
}

TEST_F(RoutingFaultTest, NamesAHeaderThatIsCutOff) {
  write(1);
  rewrite(bytes().substr(0, 20));
  EXPECT_EQ(refusal(), "at byte 20: the header is cut off (expected 32 B)");
}

TEST_F(RoutingFaultTest, NamesACorruptHeader) {
  write(1);
  std::string file = bytes();
  file[20] = 3;
  rewrite(file);
  EXPECT_TRUE(refusal().starts_with("at byte 28: checksum ")) << refusal();
}

TEST_F(RoutingFaultTest, NamesAnImpossibleHeader) {
  write(0);
  std::string file = bytes();
  routing_format::Header header;
  std::memcpy(&header, file.data(), sizeof(header));
  header.topk = 40;
  header.checksum = crc32(std::as_bytes(std::span(&header, 1)).first(28));
  std::memcpy(file.data(), &header, sizeof(header));
  rewrite(file);
  EXPECT_EQ(
      refusal(),
      "at byte 12: 2 ranks, 8 experts, topk = 40 (at least 1 of each, at most 65536 ranks, 1048576 "
      "experts, topk = 32)"
  );
  header.topk = 2;
  header.index_bytes = 3;
  header.checksum = crc32(std::as_bytes(std::span(&header, 1)).first(28));
  std::memcpy(file.data(), &header, sizeof(header));
  rewrite(file);
  EXPECT_EQ(refusal(), "at byte 12: indices have 3 B (2 or 4, wide enough)");
}

TEST_F(RoutingFaultTest, NamesARecordThatIsCutOff) {
  write(2);
  rewrite(bytes().substr(0, 32 + 64 + 10));
  EXPECT_EQ(refusal(), "at byte 96: record 1 is cut off: 10 B (at least 48)");
  write(2);
  rewrite(bytes().substr(0, 32 + 64 + 60));
  EXPECT_EQ(refusal(), "at byte 96: record 1 is cut off: 60 B (expected 64)");
}

TEST_F(RoutingFaultTest, NamesWhatIsNoRecord) {
  write(1);
  rewrite(bytes() + std::string(64, '\0'));
  EXPECT_EQ(refusal(), "at byte 96: no record 1 begins here (expected \"WREC\")");
}

TEST_F(RoutingFaultTest, NamesLengthsThatLie) {
  write(1);
  std::string file = bytes();
  file[32 + 8] = 20;
  rewrite(file);
  EXPECT_EQ(refusal(), "at byte 32: record 0 claims 20 B (at least 48)");
  file[32 + 8] = 60;
  rewrite(file);
  EXPECT_EQ(refusal(), "at byte 32: record 0 claims 60 B (its 4 tokens take 64)");
  file[32 + 32 + 7] = 1;  // 2^56 tokens
  rewrite(file);
  EXPECT_EQ(
      refusal(), "at byte 32: record 0 has 72057594037927939 tokens on a rank (at most 1073741823)"
  );
}

TEST_F(RoutingFaultTest, NamesACorruptRecord) {
  write(2);
  std::string file = bytes();
  file[96 + 50] = static_cast<char>(file[96 + 50] ^ 1);
  rewrite(file);
  EXPECT_TRUE(refusal().starts_with("at byte 96: record 1 is corrupt: checksum ")) << refusal();
  RoutingFileReader reader(path_);
  EXPECT_EQ(reader.read(0).step, 0) << "the sound record stays readable";
}

TEST_F(RoutingFaultTest, NamesAnIndexOutOfRangeBehindAGoodChecksum) {
  write(1);
  std::string file = bytes();
  file[32 + 48 + 4] = 8;
  file[32 + 48 + 5] = 0;
  const uint32_t sum = crc32(std::as_bytes(std::span(file).subspan(32 + 8)));
  std::memcpy(file.data() + 32 + 4, &sum, sizeof(sum));
  rewrite(file);
  EXPECT_EQ(refusal(), "at byte 84: expert 8 is out of range (num_experts = 8, -1 = no route)");
}

TEST_F(RoutingFaultTest, RefusesARecordThatIsNotThere) {
  write(1);
  EXPECT_EQ(
      message_of([&] { static_cast<void>(RoutingFileReader(path_).read(1)); }),
      fmt::format("read routing: {}: record 1 is out of range (1 records)", path_)
  );
}

TEST_F(RoutingFaultTest, RefusesRoutesOfAnotherShape) {
  RoutingFileWriter writer(path_, kShape);
  const std::vector<RouteTable> one(1, testing::table_of(2, {}));
  EXPECT_EQ(
      message_of([&] { writer.append(0, 0, one); }),
      "save routing: routes of 1 ranks are given (the file has 2)"
  );
  const std::vector<RouteTable> wide(2, testing::table_of(3, {{0, 1, 2}}));
  EXPECT_EQ(
      message_of([&] { writer.append(0, 0, wide); }),
      "save routing: 1 tokens with topk = 3 have 3 indices (the file has topk = 2)"
  );
  const std::vector<RouteTable> beyond(2, testing::table_of(2, {{0, 8}}));
  EXPECT_EQ(
      message_of([&] { writer.append(0, 0, beyond); }),
      "save routing: expert 8 is out of range (num_experts = 8, -1 = no route)"
  );
  EXPECT_EQ(
      message_of([&] { RoutingFileWriter(path_, {.num_ranks = 0, .num_experts = 1, .topk = 1}); }),
      "save routing: 0 ranks, 1 experts, topk = 1 (at least 1 of each, at most 65536 ranks, "
      "1048576 experts, topk = 32)"
  );
}

TEST_F(RoutingFaultTest, NamesAPlaceThatCannotBeWritten) {
  path_ = folder_ + "/absent/routing.weft";
  EXPECT_EQ(
      message_of([&] { RoutingFileWriter(path_, kShape); }),
      fmt::format("save routing: {}: at byte 0: No such file or directory (errno 2)", path_)
  );
}

TEST(RoutingFileDiskTest, NamesAFullDisk) {
  if (!std::filesystem::exists("/dev/full")) {
    GTEST_SKIP() << "no /dev/full here";
  }
  const std::string text = message_of([&] { RoutingFileWriter("/dev/full", kShape); });
  EXPECT_TRUE(text.starts_with("save routing: /dev/full: at byte 0: ")) << text;
}

}  // namespace
}  // namespace weft
