// SPDX-License-Identifier: Apache-2.0
#include "core/atomic_file.hpp"

#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <filesystem>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.hpp"
#include "core/descriptor.hpp"

namespace weft {
namespace {

[[noreturn]] void fail(std::string_view verb, const std::string& path, int error_number) {
  raise_error(ErrorCode::kFile, {}, errno_text(fmt::format("{}: {}", verb, path), error_number));
}

// 0, or the errno of the first failure.
int write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno != EINTR) {
      return errno;
    }
    bytes.remove_prefix(written < 0 ? 0 : static_cast<size_t>(written));
  }
  return ::fsync(fd) == 0 ? 0 : errno;
}

// mkstemp makes files that only their owner reads; a saved file gets the usual mode.
mode_t usual_mode() {
  const mode_t mask = ::umask(0);
  ::umask(mask);
  return 0666 & ~mask;
}

// A device or a pipe is written to, never replaced.
bool is_special(const std::string& path) {
  struct stat info = {};
  return ::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode);
}

void write_special(const std::string& path, std::string_view bytes) {
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  const int error_number = file.get() < 0 ? errno : write_all(file.get(), bytes);
  if (error_number != 0 && error_number != EINVAL) {  // EINVAL: there is nothing to flush
    fail("save", path, error_number);
  }
}

}  // namespace

void write_file_atomically(const std::string& path, std::string_view bytes) {
  if (is_special(path)) {
    write_special(path, bytes);
    return;
  }
  std::string beside = path + ".XXXXXX";
  const Descriptor file(::mkstemp(beside.data()));
  if (file.get() < 0) {
    fail("save", path, errno);
  }
  int error_number = write_all(file.get(), bytes);
  if (error_number == 0 && ::fchmod(file.get(), usual_mode()) != 0) {
    error_number = errno;
  }
  if (error_number == 0 && ::rename(beside.c_str(), path.c_str()) != 0) {
    error_number = errno;
  }
  if (error_number != 0) {
    ::unlink(beside.c_str());
    fail("save", path, error_number);
  }
  // The rename itself lasts once its folder is flushed; some file systems cannot, and need not.
  const auto parent = std::filesystem::absolute(path).parent_path();
  const Descriptor folder(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() >= 0) {
    ::fsync(folder.get());
  }
}

std::string read_whole_file(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) {
    fail("open", path, errno);
  }
  std::string text;
  char block[1 << 16];
  for (;;) {
    const ssize_t got = ::read(file.get(), block, sizeof(block));
    if (got < 0 && errno != EINTR) {
      fail("read", path, errno);
    }
    if (got == 0) {
      return text;
    }
    text.append(block, got < 0 ? 0 : static_cast<size_t>(got));
  }
}

}  // namespace weft
