// SPDX-License-Identifier: Apache-2.0
// Tells whether another process of this host still runs, by process descriptor: no polling of pids,
// no reuse hazard.
#pragma once

#include <cstdint>

namespace weft {

class ProcessWatch {
 public:
  ProcessWatch() = default;
  // Throws Error (kNotAvailable) if the process cannot be watched. Watching oneself is legal.
  explicit ProcessWatch(int32_t pid);
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;
  ~ProcessWatch();

  // One poll() with no wait. A default-made watch is always alive.
  [[nodiscard]] bool is_alive() const;

 private:
  int fd_ = -1;
};

}  // namespace weft
