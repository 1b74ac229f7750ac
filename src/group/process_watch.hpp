// SPDX-License-Identifier: Apache-2.0
// Tells whether another process of this host still runs, by process descriptor: no polling of pids,
// no hazard from a pid that is used again.
#pragma once

#include <cerrno>
#include <cstdint>
#include <poll.h>
#include <sys/syscall.h>

#include "core/check.hpp"
#include "core/descriptor.hpp"

namespace weft {

class ProcessWatch {
 public:
  ProcessWatch() = default;
  // Throws Error (kNotAvailable) if the process cannot be watched. Watching oneself is legal.
  explicit ProcessWatch(int32_t pid) : fd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
    WEFT_CHECK(
        Context{},
        fd_.is_open(),
        ErrorCode::kNotAvailable,
        "watch: no descriptor for process {} ({})",
        pid,
        errno_text("pidfd_open", errno)
    );
  }

  // One poll() with no wait. A default-made watch is always alive. A process descriptor becomes
  // readable when its process ends, reaped or not.
  [[nodiscard]] bool is_alive() const {
    pollfd entry = {.fd = fd_.get(), .events = POLLIN, .revents = 0};
    return !fd_.is_open() || ::poll(&entry, 1, 0) <= 0;
  }

 private:
  Descriptor fd_;
};

}  // namespace weft
