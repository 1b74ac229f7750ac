// SPDX-License-Identifier: Apache-2.0
#include "core/atomic_file.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>

#include "weft/error.hpp"

namespace weft {
namespace {

class AtomicFileTest : public ::testing::Test {
 protected:
  AtomicFileTest() { std::filesystem::create_directories(folder_); }
  ~AtomicFileTest() override { std::filesystem::remove_all(folder_); }
  [[nodiscard]] std::ptrdiff_t num_files() const {
    const std::filesystem::directory_iterator files(folder_);
    return std::distance(begin(files), end(files));
  }
  std::string folder_ = (std::filesystem::temp_directory_path() /
                         ("weft_atomic_file_test_" + std::to_string(::getpid())))
                            .string();
};

TEST_F(AtomicFileTest, ReturnsTheBytesThatWereWritten) {
  const std::string path = folder_ + "/file";
  const std::string bytes("a\0b\n", 4);
  write_file_atomically(path, bytes);
  EXPECT_EQ(read_whole_file(path), bytes);
  const std::string large(300000, 'x');
  write_file_atomically(path, large);
  EXPECT_EQ(read_whole_file(path), large);
  write_file_atomically(path, "");
  EXPECT_EQ(read_whole_file(path), "");
  EXPECT_EQ(num_files(), 1);
}

TEST_F(AtomicFileTest, GivesTheFileTheUsualMode) {
  const std::string path = folder_ + "/file";
  const mode_t mask = ::umask(022);
  write_file_atomically(path, "text");
  ::umask(mask);
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0644U);
}

TEST_F(AtomicFileTest, LeavesNothingBehindWhenTheTargetIsAFolder) {
  const std::string path = folder_ + "/target";
  std::filesystem::create_directories(path + "/inside");
  EXPECT_THROW(write_file_atomically(path, "text"), Error);
  EXPECT_EQ(num_files(), 1);
}

TEST_F(AtomicFileTest, NamesAFolderThatCannotBeRead) {
  try {
    static_cast<void>(read_whole_file(folder_));
    FAIL() << "a folder was read";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kFile);
    EXPECT_NE(std::string(error.what()).find(folder_), std::string::npos);
  }
}

}  // namespace
}  // namespace weft
