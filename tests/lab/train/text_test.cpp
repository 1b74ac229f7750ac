// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <unistd.h>

#include "train/batch.hpp"
#include "weft/error.hpp"

namespace weft::moe {
namespace {

namespace fs = std::filesystem;

struct TextFixture : testing::Test {
  TextFixture() {
    std::string pattern = (fs::temp_directory_path() / "weft-text-XXXXXX").string();
    folder = ::mkdtemp(pattern.data());
  }
  ~TextFixture() override { fs::remove_all(folder); }
  [[nodiscard]] std::string file(const std::string& bytes) const {
    std::ofstream(folder / "text", std::ios::binary) << bytes;
    return (folder / "text").string();
  }
  fs::path folder;
};

using TextTest = TextFixture;

std::string error_of(const std::string& path, int window) {
  try {
    static_cast<void>(read_text(path, window));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kFile);
    return error.what();
  }
  return "no error";
}

TEST_F(TextTest, ReadsEveryByteOfALargeFile) {
  std::string bytes(size_t{3} << 20, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(i * 7 % 251);
  }
  const auto text = read_text(file(bytes), 16);
  ASSERT_EQ(text.size(), bytes.size());
  EXPECT_TRUE(std::ranges::equal(text, std::as_bytes(std::span(bytes))));
}

TEST_F(TextTest, NeedsMoreBytesThanTheWindow) {
  EXPECT_EQ(read_text(file("12345"), 4).size(), 5U);
  const std::string path = file("1234");
  EXPECT_EQ(
      error_of(path, 4).rfind("read: " + path + " holds 4 B (more than the window of 4 B)", 0), 0U
  );
}

TEST_F(TextTest, NamesAFileThatCannotBeRead) {
  const std::string missing = (folder / "none").string();
  EXPECT_NE(error_of(missing, 4).find(missing + ": No such file"), std::string::npos);
  EXPECT_NE(error_of(folder.string(), 4).find(folder.string()), std::string::npos);
}

std::vector<std::byte> counting_text(size_t size) {
  std::vector<std::byte> text(size);
  for (size_t i = 0; i < size; ++i) {
    text[i] = static_cast<std::byte>(i);
  }
  return text;
}

TEST(BatchTest, TargetIsTheByteAfterTheWindow) {
  const auto text = counting_text(200);
  Batch batch;
  BatchSource(text, 3, 1).draw(0, {0, 50}, batch);
  for (size_t t = 0; t < 50; ++t) {
    const auto first = std::to_integer<int>(batch.windows[t * 3]);
    EXPECT_EQ(std::to_integer<int>(batch.windows[t * 3 + 2]), first + 2);
    EXPECT_EQ(std::to_integer<int>(batch.targets[t]), first + 3);
  }
}

TEST(BatchTest, SharesOfTheRanksAreTheGlobalBatch) {
  const auto text = counting_text(200);
  const BatchSource source(text, 3, 1);
  Batch whole;
  source.draw(9, {0, 10}, whole);
  for (const int num_ranks : {1, 3, 4, 8, 16}) {
    std::vector<std::byte> joined;
    for (int rank = 0; rank < num_ranks; ++rank) {
      Batch part;
      source.draw(9, tokens_of_rank(10, rank, num_ranks), part);
      joined.insert(joined.end(), part.windows.begin(), part.windows.end());
    }
    EXPECT_EQ(joined, whole.windows) << num_ranks << " ranks";
  }
}

TEST(BatchTest, ShardsAreTheSameTokensForAnyNumberOfRanks) {
  for (const int num_ranks : {1, 2, 3, 5, 8}) {
    for (const int64_t global_batch : {3, 67, 1024}) {
      std::vector<int64_t> begins;
      for (int rank = 0; rank < num_ranks; ++rank) {
        const Range tokens = tokens_of_rank(global_batch, rank, num_ranks);
        const Shards shards = make_shards(global_batch, rank, num_ranks);
        EXPECT_EQ(shards.back().end, tokens.size());
        for (const Range& shard : shards) {
          begins.push_back(tokens.begin + shard.begin);
        }
      }
      ASSERT_EQ(begins.size(), static_cast<size_t>(kNumShards)) << num_ranks << " ranks";
      for (int64_t shard = 0; shard < kNumShards; ++shard) {
        EXPECT_EQ(begins[static_cast<size_t>(shard)], global_batch * shard / kNumShards);
      }
    }
  }
}

TEST(BatchTest, ReachesTheFirstAndTheLastPosition) {
  const auto text = counting_text(6);
  Batch batch;
  BatchSource(text, 3, 1).draw(0, {0, 100}, batch);
  std::array<bool, 6> seen = {};
  for (const std::byte target : batch.targets) {
    seen[std::to_integer<size_t>(target)] = true;
  }
  EXPECT_EQ(seen, (std::array<bool, 6>{false, false, false, true, true, true}));
}

TEST(BatchTest, DiffersFromStepToStep) {
  const auto text = counting_text(200);
  const BatchSource source(text, 3, 1);
  Batch first;
  Batch second;
  source.draw(0, {0, 20}, first);
  source.draw(1, {0, 20}, second);
  EXPECT_NE(first.windows, second.windows);
}

}  // namespace
}  // namespace weft::moe
