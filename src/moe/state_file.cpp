// SPDX-License-Identifier: Apache-2.0
#include "moe/state_file.hpp"

#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.hpp"

namespace weft::moe {
namespace {

[[noreturn]] void fail(const std::string& path, std::string_view what, int error_number) {
  raise_error(ErrorCode::kFile, {}, errno_text(fmt::format("{} {}", what, path), error_number));
}

int flags_of(StateFile::Mode mode) {
  switch (mode) {
    case StateFile::Mode::kRead:
      return O_RDONLY;
    case StateFile::Mode::kCreate:
      return O_RDWR | O_CREAT | O_TRUNC;
    case StateFile::Mode::kWrite:
      return O_RDWR;
  }
  return O_RDONLY;
}

}  // namespace

StateFile::StateFile(std::string path, Mode mode) : path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), flags_of(mode) | O_CLOEXEC, 0644);
  if (fd_ < 0) {
    fail(path_, mode == Mode::kRead ? "read" : "write", errno);
  }
}

StateFile::~StateFile() {
  ::close(fd_);
}

uint64_t StateFile::size() const {
  struct stat status = {};
  if (::fstat(fd_, &status) != 0) {
    fail(path_, "read", errno);
  }
  return static_cast<uint64_t>(status.st_size);
}

void StateFile::read_at(uint64_t offset, std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t got = ::pread(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      fail(path_, "read", errno);
    }
    WEFT_CHECK(
        Context{},
        got > 0,
        ErrorCode::kFile,
        "read {}: it ends at byte {} (truncated)",
        path_,
        offset
    );
    bytes = bytes.subspan(static_cast<size_t>(got));
    offset += static_cast<uint64_t>(got);
  }
}

void StateFile::write_at(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) {
      continue;
    }
    if (put < 0) {
      fail(path_, "write", errno);
    }
    bytes = bytes.subspan(static_cast<size_t>(put));
    offset += static_cast<uint64_t>(put);
  }
}

void StateFile::sync() {
  if (::fsync(fd_) != 0) {
    fail(path_, "write", errno);
  }
}

void replace_file(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) {
    fail(to, "write", errno);
  }
  // The new name lasts only once the folder is on the disk.
  const auto folder = std::filesystem::path(to).parent_path();
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd >= 0) {
    ::fsync(fd);
    ::close(fd);
  }
}

}  // namespace weft::moe
