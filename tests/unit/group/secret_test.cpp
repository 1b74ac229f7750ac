// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sys/stat.h>

#include "group/environment.hpp"
#include "group_test.hpp"
#include "unit/core/fake_env.hpp"

namespace weft {
namespace {

namespace fs = std::filesystem;

class SecretTest : public testing::Test {
 protected:
  SecretTest() {
    std::string name = (fs::temp_directory_path() / "weft_secret_XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~SecretTest() override { fs::remove_all(folder_); }

  [[nodiscard]] std::string write(const std::string& text, mode_t mode) const {
    const fs::path path = folder_ / "given";
    std::ofstream(path) << text;
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path.string();
  }
  [[nodiscard]] Env env() const { return env_of({{"XDG_RUNTIME_DIR", folder_.string()}}); }

  fs::path folder_;
};

TEST_F(SecretTest, ReadsAFileWithoutItsLineEnd) {
  EXPECT_EQ(read_secret_file(write("0123456789abcdef\n", 0600)), "0123456789abcdef");
  EXPECT_EQ(read_secret_file(write("0123456789abcdef", 0400)), "0123456789abcdef");
}

TEST_F(SecretTest, RefusesAFileThatOthersMayRead) {
  for (const mode_t mode : {0640U, 0604U, 0660U, 0644U}) {
    const std::string path = write("0123456789abcdef", mode);
    expect_error(
        ErrorCode::kFile,
        fmt::format("secret: {}: is open to other users (mode {:o}, expected 600)", path, mode),
        [&] { static_cast<void>(read_secret_file(path)); }
    );
  }
}

TEST_F(SecretTest, NamesAFileThatIsMissingOrShort) {
  const std::string missing = (folder_ / "missing").string();
  expect_error(
      ErrorCode::kFile,
      "secret: " + missing + ": cannot be read (No such file or directory)",
      [&] { static_cast<void>(read_secret_file(missing)); }
  );
  const std::string path = write("short\n", 0600);
  expect_error(ErrorCode::kFile, "secret: " + path + ": holds 5 B (a secret has at least 16)", [&] {
    static_cast<void>(read_secret_file(path));
  });
  expect_error(ErrorCode::kFile, "secret: " + folder_.string() + ": ", [&] {
    static_cast<void>(read_secret_file(folder_.string()));
  });
}

TEST_F(SecretTest, WaitsForNoPipe) {
  const std::string path = (folder_ / "pipe").string();
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  expect_error(
      ErrorCode::kFile,
      "secret: " + path + ": is not a file with text, but a folder, pipe or device",
      [&] { static_cast<void>(read_secret_file(path)); }
  );
}

TEST_F(SecretTest, MakesOneSecretThatOnlyItsUserMayRead) {
  const std::string secret = user_secret(env());
  EXPECT_GE(secret.size(), 64U);
  EXPECT_EQ(user_secret(env()), secret);
  struct stat status = {};
  ASSERT_EQ(stat((folder_ / "weft" / "secret").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0600U);
  ASSERT_EQ(stat((folder_ / "weft").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0700U);
}

TEST_F(SecretTest, FallsBackToTheHomeFolder) {
  const Env home = env_of({{"HOME", folder_.string()}});
  const std::string secret = user_secret(home);
  EXPECT_EQ(secret, read_secret_file((folder_ / ".config" / "weft" / "secret").string()));
}

TEST_F(SecretTest, NamesWhatIsMissingWhenThereIsNoPlace) {
  expect_error(
      ErrorCode::kInvalidArgument,
      "secret: no place to keep one (neither XDG_RUNTIME_DIR nor HOME is set). Set WEFT_SECRET",
      [] { static_cast<void>(user_secret(env_of({}))); }
  );
}

TEST_F(SecretTest, NamesAFolderThatCannotBeMade) {
  const std::string path = write("a file, not a folder", 0600);
  expect_error(ErrorCode::kFile, "secret: " + path + "/weft: cannot be made (", [&] {
    static_cast<void>(user_secret(env_of({{"XDG_RUNTIME_DIR", path}})));
  });
}

TEST_F(SecretTest, RanksThatStartTogetherAgree) {
  std::vector<std::string> secrets(8);
  {
    std::vector<std::jthread> threads;
    for (std::string& secret : secrets) {
      threads.emplace_back([&] { secret = user_secret(env()); });
    }
  }
  EXPECT_EQ(std::set<std::string>(secrets.begin(), secrets.end()).size(), 1U);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "weft"), {}), 1);
}

}  // namespace
}  // namespace weft
