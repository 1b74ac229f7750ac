// SPDX-License-Identifier: Apache-2.0
#include "group/process_watch.hpp"

#include <cerrno>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

#include "core/check.hpp"

namespace weft {

ProcessWatch::ProcessWatch(int32_t pid) : fd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
  WEFT_CHECK(
      Context{},
      fd_ >= 0,
      ErrorCode::kNotAvailable,
      "watch: no descriptor for process {} ({})",
      pid,
      errno_text("pidfd_open", errno)
  );
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

ProcessWatch::~ProcessWatch() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

// A process descriptor becomes readable when its process ends, reaped or not.
bool ProcessWatch::is_alive() const {
  if (fd_ < 0) {
    return true;
  }
  pollfd entry = {.fd = fd_, .events = POLLIN, .revents = 0};
  return ::poll(&entry, 1, 0) <= 0;
}

}  // namespace weft
