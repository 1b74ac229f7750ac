// SPDX-License-Identifier: Apache-2.0
#include "plan/routing_file.hpp"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <unistd.h>

#include "core/atomic_file.hpp"
#include "plan/crc32.hpp"
#include "plan/random_routing.hpp"
#include "unit/plan/plan_cases.hpp"

namespace weft {
namespace {

using testing::message_of;
using Mode = RoutingFileWriter::Mode;
using Tail = RoutingFileReader::Tail;

constexpr RoutingFileShape kShape = {.num_ranks = 2, .num_experts = 8, .topk = 2};

class RoutingFileTest : public ::testing::Test {
 protected:
  RoutingFileTest() { std::filesystem::create_directories(folder_); }
  ~RoutingFileTest() override { std::filesystem::remove_all(folder_); }

  // Three tokens on rank 0, one on rank 1: records of 32 + 16 + 16 B.
  static std::vector<RouteTable> routes(uint64_t seed, int num_experts = 8) {
    RandomRouting spec;
    spec.num_experts = num_experts;
    spec.topk = 2;
    spec.hole_fraction = 0.2;
    spec.seed = seed;
    spec.num_tokens = 3;
    const RouteTable first = random_routing(spec, 0);
    spec.num_tokens = 1;
    return {first, random_routing(spec, 1)};
  }
  void write(int num_records, Mode mode = Mode::kNew) const {
    RoutingFileWriter writer(path_, kShape, mode);
    for (int i = 0; i < num_records; ++i) {
      writer.append(10 * i, i % 3, routes(static_cast<uint64_t>(i)));
    }
  }
  void rewrite(const std::string& bytes) const { write_file_atomically(path_, bytes); }
  [[nodiscard]] std::string bytes() const { return read_whole_file(path_); }
  [[nodiscard]] std::string refusal() const {
    const std::string text = message_of([&] {
      RoutingFileReader reader(path_);
      for (int64_t i = 0; i < reader.num_records(); ++i) {
        static_cast<void>(reader.read(i));
      }
    });
    const std::string begin = fmt::format("read routing: {}: ", path_);
    return text.starts_with(begin) ? text.substr(begin.size()) : text;
  }

  std::string folder_ =
      (std::filesystem::temp_directory_path() / fmt::format("weft_routing_test_{}", ::getpid()))
          .string();
  std::string path_ = folder_ + "/routing.weft";
};

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
          "save routing: {}: holds 2 ranks, 8 experts, topk = 2 (expected 4, 8 and 2)", path_
      )
  );
}

TEST_F(RoutingFileTest, NamesAMissingFile) {
  EXPECT_EQ(refusal(), "No such file or directory (errno 2)");
}

TEST_F(RoutingFileTest, NamesAFolder) {
  path_ = folder_;
  EXPECT_EQ(refusal(), "Is a directory (errno 21)");
}

TEST_F(RoutingFileTest, NamesAnEmptyFile) {
  rewrite("");
  EXPECT_EQ(refusal(), "at byte 0: the file is empty (expected a routing file)");
}

TEST_F(RoutingFileTest, NamesAForeignFile) {
  rewrite("It is a truth universally acknowledged");
  EXPECT_EQ(refusal(), "at byte 0: not a routing file (expected it to begin with \"WEFTROUT\")");
  rewrite("WEFT");
  EXPECT_EQ(refusal(), "at byte 0: not a routing file (expected it to begin with \"WEFTROUT\")");
}

TEST_F(RoutingFileTest, NamesAnotherVersion) {
  write(1);
  std::string file = bytes();
  file[8] = 9;
  rewrite(file);
  EXPECT_EQ(refusal(), "at byte 8: version 9 (expected 1)");
}

TEST_F(RoutingFileTest, NamesAHeaderThatIsCutOff) {
  write(1);
  rewrite(bytes().substr(0, 20));
  EXPECT_EQ(refusal(), "at byte 20: the header is cut off (expected 32 B)");
}

TEST_F(RoutingFileTest, NamesACorruptHeader) {
  write(1);
  std::string file = bytes();
  file[20] = 3;
  rewrite(file);
  EXPECT_TRUE(refusal().starts_with("at byte 28: checksum ")) << refusal();
}

TEST_F(RoutingFileTest, NamesAnImpossibleHeader) {
  write(0);
  std::string file = bytes();
  routing_format::Header header;
  std::memcpy(&header, file.data(), sizeof(header));
  header.topk = 40;
  header.checksum = crc32(std::as_bytes(std::span(&header, 1)).first(28));
  std::memcpy(file.data(), &header, sizeof(header));
  rewrite(file);
  EXPECT_EQ(refusal(), "at byte 12: 2 ranks, 8 experts, topk = 40 (1 to 65536, 1048576 and 32)");
  header.topk = 2;
  header.index_bytes = 3;
  header.checksum = crc32(std::as_bytes(std::span(&header, 1)).first(28));
  std::memcpy(file.data(), &header, sizeof(header));
  rewrite(file);
  EXPECT_EQ(refusal(), "at byte 12: indices have 3 B (2 or 4, wide enough)");
}

TEST_F(RoutingFileTest, NamesARecordThatIsCutOff) {
  write(2);
  rewrite(bytes().substr(0, 32 + 64 + 10));
  EXPECT_EQ(refusal(), "at byte 96: record 1 is cut off: 10 B (at least 48)");
  write(2);
  rewrite(bytes().substr(0, 32 + 64 + 60));
  EXPECT_EQ(refusal(), "at byte 96: record 1 is cut off: 60 B (expected 64)");
}

TEST_F(RoutingFileTest, NamesWhatIsNoRecord) {
  write(1);
  rewrite(bytes() + std::string(64, '\0'));
  EXPECT_EQ(refusal(), "at byte 96: no record 1 begins here (expected \"WREC\")");
}

TEST_F(RoutingFileTest, NamesLengthsThatLie) {
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

TEST_F(RoutingFileTest, NamesACorruptRecord) {
  write(2);
  std::string file = bytes();
  file[96 + 50] = static_cast<char>(file[96 + 50] ^ 1);
  rewrite(file);
  EXPECT_TRUE(refusal().starts_with("at byte 96: record 1 is corrupt: checksum ")) << refusal();
  RoutingFileReader reader(path_);
  EXPECT_EQ(reader.read(0).step, 0) << "the sound record stays readable";
}

TEST_F(RoutingFileTest, NamesAnIndexOutOfRangeBehindAGoodChecksum) {
  write(1);
  std::string file = bytes();
  file[32 + 48 + 4] = 8;
  file[32 + 48 + 5] = 0;
  const uint32_t sum = crc32(std::as_bytes(std::span(file).subspan(32 + 8)));
  std::memcpy(file.data() + 32 + 4, &sum, sizeof(sum));
  rewrite(file);
  EXPECT_EQ(refusal(), "at byte 84: expert 8 is out of range (num_experts = 8, -1 = no route)");
}

TEST_F(RoutingFileTest, RefusesARecordThatIsNotThere) {
  write(1);
  EXPECT_EQ(
      message_of([&] { static_cast<void>(RoutingFileReader(path_).read(1)); }),
      fmt::format("read routing: {}: record 1 is out of range (1 records)", path_)
  );
}

TEST_F(RoutingFileTest, RefusesRoutesOfAnotherShape) {
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
      "save routing: 0 ranks, 1 experts, topk = 1 (at most 65536, 1048576 and 32)"
  );
}

TEST_F(RoutingFileTest, NamesAPlaceThatCannotBeWritten) {
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

TEST(Crc32Test, GivesThePublishedCheckValue) {
  const std::string_view digits = "123456789";
  EXPECT_EQ(crc32(std::as_bytes(std::span(digits))), 0xcbf43926U);
}

}  // namespace
}  // namespace weft
