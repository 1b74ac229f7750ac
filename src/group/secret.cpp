// SPDX-License-Identifier: Apache-2.0
#include "group/secret.hpp"

#include <sodium.h>

#include <array>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

#include "core/check.hpp"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr size_t kRandomBytes = 32;
constexpr size_t kMaxFileBytes = 4096;

// A file descriptor for as long as it is in scope.
class File {
 public:
  File(const std::string& path, int flags, mode_t mode = 0)
      : fd_(open(path.c_str(), flags | O_CLOEXEC, mode)) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void fail(const std::string& path, const std::string& why) {
  raise_error(ErrorCode::kFile, {}, fmt::format("secret: {}: {}", path, why));
}

std::string random_text() {
  if (sodium_init() < 0) {
    raise_error(ErrorCode::kNotAvailable, {}, "secret: no random numbers here");
  }
  std::array<unsigned char, kRandomBytes> bytes;
  randombytes_buf(bytes.data(), bytes.size());
  std::string text(2 * kRandomBytes + 1, '\0');
  sodium_bin2hex(text.data(), text.size(), bytes.data(), bytes.size());
  text.pop_back();
  return text;
}

// Complete or not there: the file gets its name only when its text is in it, and a name that
// another rank was first to take stays.
void create_secret_file(const std::string& path) {
  const std::string draft = fmt::format("{}.{}.{}", path, getpid(), random_text().substr(0, 16));
  const std::string text = random_text() + "\n";
  {
    const File file(draft, O_CREAT | O_EXCL | O_WRONLY, S_IRUSR | S_IWUSR);
    const auto size = static_cast<ssize_t>(text.size());
    if (file.fd() < 0 || write(file.fd(), text.data(), text.size()) != size) {
      const int error = errno;
      unlink(draft.c_str());
      fail(draft, fmt::format("cannot be written ({})", std::strerror(error)));
    }
  }
  const bool is_linked = link(draft.c_str(), path.c_str()) == 0 || errno == EEXIST;
  const int error = errno;
  unlink(draft.c_str());
  if (!is_linked) {
    fail(path, fmt::format("cannot be made ({})", std::strerror(error)));
  }
}

fs::path user_folder(const Env& env) {
  if (env.runtime_dir) {
    return fs::path(*env.runtime_dir) / "weft";
  }
  if (env.home) {
    return fs::path(*env.home) / ".config" / "weft";
  }
  raise_error(
      ErrorCode::kInvalidArgument,
      {},
      "secret: no place to keep one (neither XDG_RUNTIME_DIR nor HOME is set). Set WEFT_SECRET"
  );
}

}  // namespace

std::string read_secret_file(const std::string& path) {
  const File file(path, O_RDONLY);
  if (file.fd() < 0) {
    fail(path, fmt::format("cannot be read ({})", std::strerror(errno)));
  }
  struct stat status = {};
  WEFT_SYS(Context{}, ErrorCode::kFile, fstat(file.fd(), &status));
  if (status.st_uid != geteuid()) {
    fail(path, fmt::format("belongs to user {} (expected {})", status.st_uid, geteuid()));
  }
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    fail(
        path,
        fmt::format(
            "is open to other users (mode {:o}, expected 600). chmod 600 it, or make a new one",
            status.st_mode & 0777U
        )
    );
  }
  std::string text(kMaxFileBytes, '\0');
  const auto count = read(file.fd(), text.data(), text.size());
  if (count < 0) {
    fail(path, fmt::format("cannot be read ({})", std::strerror(errno)));
  }
  text.resize(static_cast<size_t>(count));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) {
    text.pop_back();
  }
  if (text.size() < kMinSecretBytes) {
    fail(path, fmt::format("holds {} B (a secret has at least {})", text.size(), kMinSecretBytes));
  }
  return text;
}

std::string user_secret(const Env& env) {
  const fs::path folder = user_folder(env);
  std::error_code error;
  if (fs::create_directories(folder, error)) {
    fs::permissions(folder, fs::perms::owner_all, error);
  }
  if (error) {
    fail(folder, fmt::format("cannot be made ({}). Set WEFT_SECRET", error.message()));
  }
  const fs::path path = folder / "secret";
  if (!fs::exists(path, error)) {
    create_secret_file(path);
  }
  return read_secret_file(path);
}

}  // namespace weft
