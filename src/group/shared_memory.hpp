// SPDX-License-Identifier: Apache-2.0
// Memory that other processes of this host can map. It never has a name in a file system (memfd),
// so nothing is left behind however a process ends, and the size of /dev/shm does not bound it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace weft {

// What another process needs to map it; trivially copyable, travels between ranks.
struct SharedMemoryRef {
  uint64_t bytes = 0;
  uint64_t inode = 0;  // guards against a reused pid or descriptor
  int32_t pid = 0;
  int32_t fd = -1;
};

class SharedMemory {
 public:
  SharedMemory() = default;
  // Zero-filled. Throws Error (kOutOfMemory).
  [[nodiscard]] static SharedMemory create(uint64_t bytes);
  // Maps another process's (or this one's) memory by /proc/<pid>/fd. Throws Error (kNotAvailable)
  // with the reason.
  [[nodiscard]] static SharedMemory open(const SharedMemoryRef& ref);

  SharedMemory(SharedMemory&& other) noexcept { swap(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept {
    SharedMemory(std::move(other)).swap(*this);
    return *this;
  }
  ~SharedMemory();

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] uint64_t bytes() const { return ref_.bytes; }
  [[nodiscard]] const SharedMemoryRef& ref() const { return ref_; }

 private:
  void swap(SharedMemory& other) noexcept;
  std::byte* data_ = nullptr;
  SharedMemoryRef ref_ = {};
  int fd_ = -1;  // owned by the creator alone
};

}  // namespace weft
