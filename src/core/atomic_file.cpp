// SPDX-License-Identifier: Apache-2.0
#include "core/atomic_file.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <filesystem>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/available_memory.hpp"
#include "core/check.hpp"

namespace weft {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(std::string_view verb, const std::string& path, int error_number) {
  raise_error(ErrorCode::kFile, {}, errno_text(fmt::format("{}: {}", verb, path), error_number));
}
[[noreturn]] void fail(std::string_view verb, const std::string& path, std::string_view problem) {
  raise_error(ErrorCode::kFile, {}, fmt::format("{}: {}: {}", verb, path, problem));
}

// Returns where the links of the path lead to; the last name need not be there.
std::string target_of(const std::string& path) {
  constexpr int kMostLinks = 40;  // as Linux has it
  fs::path target = path;
  std::error_code none;
  for (int i = 0; fs::is_symlink(fs::symlink_status(target, none)); ++i) {
    if (i == kMostLinks) {
      fail("save", path, ELOOP);
    }
    target = target.parent_path() / fs::read_symlink(target, none);  // absolute ones replace it
  }
  return target.string();
}

// True for a device or a pipe, which is written to, never replaced.
bool is_special(const std::string& path) {
  struct stat info = {};
  return ::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode);
}

// Gives the file the owner and mode of the one whose place it takes, or the mode of any new file.
int take_mode(int fd, const std::string& target) {
  struct stat old = {};
  if (::stat(target.c_str(), &old) == 0) {
    static_cast<void>(::fchown(fd, old.st_uid, old.st_gid) == 0);  // where that is allowed
    return ::fchmod(fd, old.st_mode & 0777U);
  }
  const mode_t mask = ::umask(0);
  ::umask(mask);
  return ::fchmod(fd, 0666 & ~mask);
}

void write_special(const std::string& path, std::string_view bytes) {
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  while (file.is_open() && !bytes.empty()) {
    const ssize_t written = ::write(file.get(), bytes.data(), bytes.size());
    if (written < 0 && errno != EINTR) {
      break;
    }
    bytes.remove_prefix(written < 0 ? 0 : static_cast<size_t>(written));
  }
  if (!file.is_open() || !bytes.empty()) {
    fail("save", path, errno);
  }
}

}  // namespace

NextFile::NextFile(const std::string& path)
    : path_(path), target_(target_of(path)), unfinished_(target_ + ".unfinished"), is_maker_(true) {
  struct stat old = {};
  if (::stat(target_.c_str(), &old) == 0 && !S_ISREG(old.st_mode)) {
    fail("save", path_, S_ISDIR(old.st_mode) ? "it is a folder" : "it is no regular file");
  }
  constexpr int kFlags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  while (!is_at_its_name()) {
    file_ = Descriptor(::open(unfinished_.c_str(), kFlags | O_CREAT | O_EXCL, 0600));
    const bool is_new = file_.is_open();
    if (!is_new && errno == EEXIST) {
      struct stat left = {};  // only a file is opened: a device may do something when it is
      const bool is_file = ::lstat(unfinished_.c_str(), &left) != 0 || S_ISREG(left.st_mode);
      file_ = Descriptor(is_file ? ::open(unfinished_.c_str(), kFlags) : -1);
      errno = is_file ? errno : EEXIST;
    }
    if (!file_.is_open()) {
      fail("save", unfinished_, errno);
    }
    // Some file systems have no locks; there the name alone keeps makers apart.
    if (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      fail("save", unfinished_, "another process is making it");
    }
    if (!is_new) {  // left by a crash, as no process holds it; unless another maker was first
      if (is_at_its_name() && ::unlink(unfinished_.c_str()) != 0) {
        fail("save", unfinished_, errno);
      }
      file_.close();
    }
  }
}

NextFile::NextFile(const std::string& path, uint64_t number)
    : path_(path), target_(target_of(path)), unfinished_(target_ + ".unfinished") {
  file_ = Descriptor(::open(unfinished_.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file_.is_open()) {
    fail("save", unfinished_, errno);
  }
  if (this->number() != number) {
    fail("save", unfinished_, "it is another file than the one that was made");
  }
}

NextFile::~NextFile() {
  if (is_maker_ && is_at_its_name()) {
    ::unlink(unfinished_.c_str());
  }
}

bool NextFile::is_at_its_name() const {
  struct stat named = {};
  return file_.is_open() && ::lstat(unfinished_.c_str(), &named) == 0 && named.st_ino == number();
}

uint64_t NextFile::number() const {
  struct stat info = {};
  return ::fstat(file_.get(), &info) == 0 ? info.st_ino : 0;
}

void NextFile::write_at(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done =
        ::pwrite(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (done < 0 && errno != EINTR) {
      fail("save", path_, errno);
    }
    bytes = bytes.subspan(done < 0 ? 0 : static_cast<size_t>(done));
    offset += done < 0 ? 0 : static_cast<uint64_t>(done);
  }
}

void NextFile::flush() {
  if (::fsync(file_.get()) != 0) {
    fail("save", path_, errno);
  }
}

void NextFile::commit() {
  flush();
  if (!is_at_its_name()) {
    fail("save", unfinished_, "somebody has taken it away");
  }
  if (take_mode(file_.get(), target_) != 0 || ::rename(unfinished_.c_str(), target_.c_str()) != 0) {
    fail("save", path_, errno);
  }
  is_maker_ = false;  // nothing is left to remove
  // The rename itself lasts once its folder is flushed; some file systems cannot, and need not.
  const auto parent = fs::absolute(target_).parent_path();
  const Descriptor folder(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.is_open()) {
    ::fsync(folder.get());
  }
}

void write_file_atomically(const std::string& path, std::string_view bytes) {
  if (is_special(path)) {
    write_special(path, bytes);
    return;
  }
  NextFile file(path);
  file.write_at(0, std::as_bytes(std::span(bytes)));
  file.commit();
}

void check_writable(const std::string& path) {
  if (is_special(path)) {
    if (::access(path.c_str(), W_OK) != 0) {
      fail("save", path, errno);
    }
    return;
  }
  const NextFile probe(path);
}

std::string read_whole_file(const std::string& path, uint64_t most) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat found = {};
  if (file.get() < 0 || ::fstat(file.get(), &found) != 0) {
    fail("open", path, errno);
  }
  if (S_ISCHR(found.st_mode) || S_ISBLK(found.st_mode)) {
    fail("read", path, "it is a device (expected a file or a pipe)");
  }
  most = std::min(most, memory_bounds().available / 4);
  const auto check_size = [&](uint64_t bytes) {
    if (bytes > most) {
      fail("read", path, fmt::format("it holds more than {} B", most));
    }
  };
  check_size(S_ISREG(found.st_mode) ? static_cast<uint64_t>(found.st_size) : 0);
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
    check_size(text.size());
  }
}

}  // namespace weft
