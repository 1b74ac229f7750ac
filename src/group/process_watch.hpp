// SPDX-License-Identifier: Apache-2.0
// Tells whether another process of this host still runs, by process descriptor. Where the system
// gives none (an old kernel, a container's filter, no descriptor left) each is_alive() signals the
// pid and reads in /proc which process has it.
#pragma once

#include <cstdint>

#include "core/descriptor.hpp"

namespace weft {

class ProcessWatch {
 public:
  ProcessWatch() = default;
  // Never fails. A process may watch itself.
  explicit ProcessWatch(int32_t pid);

  // False once the end of the process is proven, reaped or not; true if it cannot be known. Costs
  // one poll() with no wait where there is a descriptor. A default-made watch is always alive.
  [[nodiscard]] bool is_alive() const;
  // This watch will see the end of the process, reaped or not.
  [[nodiscard]] bool sees_end() const { return fd_.is_open() || had_ended_ || begin_ != 0; }

 private:
  Descriptor fd_;
  int32_t pid_ = 0;         // 0: nothing is watched
  uint64_t begin_ = 0;      // without a descriptor: the process's time in /proc, 0: unknown
  bool had_ended_ = false;  // when the watch began
};

}  // namespace weft
