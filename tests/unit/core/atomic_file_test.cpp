// SPDX-License-Identifier: Apache-2.0
#include "core/atomic_file.hpp"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <filesystem>
#include <span>
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

mode_t mode_of(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(::lstat(path.c_str(), &status), 0);
  return status.st_mode;
}

TEST_F(AtomicFileTest, KeepsTheModeOfTheFileItReplaces) {
  const std::string path = folder_ + "/file";
  write_file_atomically(path, "old");
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  write_file_atomically(path, "new");
  EXPECT_EQ(mode_of(path) & 0777U, 0600U);
  EXPECT_EQ(read_whole_file(path), "new");
}

TEST_F(AtomicFileTest, LeavesLinksAsTheyAre) {
  const std::string path = folder_ + "/link";
  std::filesystem::create_directories(folder_ + "/inside");
  std::filesystem::create_symlink("inside/middle", path);
  std::filesystem::create_symlink("file", folder_ + "/inside/middle");  // of nothing yet
  for (const char* text : {"first", "second"}) {
    write_file_atomically(path, text);
    EXPECT_TRUE(S_ISLNK(mode_of(path)));
    EXPECT_TRUE(S_ISREG(mode_of(folder_ + "/inside/file")));
    EXPECT_EQ(read_whole_file(folder_ + "/inside/file"), text);
  }
}

TEST_F(AtomicFileTest, WritesToAPipeAndNeverReplacesIt) {
  const std::string path = folder_ + "/pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const Descriptor reader(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  write_file_atomically(path, "text");
  char text[8] = {};
  EXPECT_EQ(::read(reader.get(), text, sizeof(text)), 4);
  EXPECT_STREQ(text, "text");
  EXPECT_THROW(NextFile{path}, Error);
  EXPECT_TRUE(S_ISFIFO(mode_of(path)));
}

TEST_F(AtomicFileTest, WritesThroughNoLinkThatLiesInItsWay) {
  const std::string path = folder_ + "/file";
  write_file_atomically(folder_ + "/other", "of somebody else");
  std::filesystem::create_symlink("other", path + ".unfinished");
  EXPECT_THROW(write_file_atomically(path, "text"), Error);
  EXPECT_EQ(read_whole_file(folder_ + "/other"), "of somebody else");
}

TEST_F(AtomicFileTest, RemovesWhatACrashHasLeft) {
  const std::string path = folder_ + "/file";
  std::filesystem::copy_file("/proc/self/exe", path + ".unfinished");
  write_file_atomically(path, "text");
  EXPECT_EQ(read_whole_file(path), "text");
  EXPECT_EQ(num_files(), 1);
}

TEST_F(AtomicFileTest, IsMadeByOneAtATime) {
  const std::string path = folder_ + "/file";
  {
    NextFile first(path);
    try {
      NextFile second(path);
      FAIL() << "two made the same file";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("another process is making it"), std::string::npos);
    }
    first.write_at(2, std::as_bytes(std::span("cd", 2)));
    NextFile part(path, first.number());
    part.write_at(0, std::as_bytes(std::span("ab", 2)));
    EXPECT_THROW(NextFile(path, first.number() + 1), Error);
    first.commit();
  }
  EXPECT_EQ(read_whole_file(path), "abcd");
  EXPECT_EQ(num_files(), 1);
  { const NextFile unused(path); }
  EXPECT_EQ(read_whole_file(path), "abcd");
  EXPECT_EQ(num_files(), 1);
}

TEST_F(AtomicFileTest, SaysBeforehandWhereNothingCanBeWritten) {
  check_writable(folder_ + "/file");
  check_writable("/dev/null");
  EXPECT_EQ(num_files(), 0);
  EXPECT_THROW(check_writable(folder_), Error);
  EXPECT_THROW(check_writable(folder_ + "/none/file"), Error);
}

TEST_F(AtomicFileTest, ReadsNoMoreThanItsBound) {
  const std::string path = folder_ + "/file";
  write_file_atomically(path, std::string(1000, 'a'));
  EXPECT_EQ(read_whole_file(path, 1000).size(), 1000);
  EXPECT_THROW(static_cast<void>(read_whole_file(path, 999)), Error);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const Descriptor out(ends[0]);
  ASSERT_EQ(::write(ends[1], path.data(), path.size()), std::ssize(path));
  ::close(ends[1]);
  const std::string pipe = "/dev/fd/" + std::to_string(ends[0]);
  EXPECT_THROW(static_cast<void>(read_whole_file(pipe, path.size() - 1)), Error);
}

TEST_F(AtomicFileTest, ReadsNoDevice) {
  try {
    static_cast<void>(read_whole_file("/dev/zero"));
    FAIL() << "a device was read";
  } catch (const Error& error) {
    EXPECT_TRUE(std::string(error.what())
                    .starts_with("read: /dev/zero: it is a device (expected a file or a pipe)"));
  }
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
