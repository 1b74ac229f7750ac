// SPDX-License-Identifier: Apache-2.0
// Memory in pages: of this process, or such that other processes of this host can map it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <sys/mman.h>

#include "core/descriptor.hpp"
#include "weft/error.hpp"

namespace weft {

struct UnmapPages {
  uint64_t bytes = 0;
  void operator()(std::byte* data) const { ::munmap(data, bytes); }
};
using Pages = std::unique_ptr<std::byte, UnmapPages>;

// Maps `bytes` of `fd` (shared), or of fresh private memory if fd is -1, readable and writable.
// Spans of 2 MiB and more begin on a 2 MiB boundary and ask for large pages: rows lie in arbitrary
// places, and with small pages address translation costs half the reading speed (two threads
// summing random 4 KiB rows, Xeon at 2.3 GHz in a virtual machine, 2026-11-20: 10 GB/s each with 4
// KiB pages, 21 GB/s with 2 MiB pages). Throws Error with `code`.
[[nodiscard]] Pages map_pages(int fd, uint64_t bytes, ErrorCode code);

// Makes every page present and writable now, so that a shortage is an error here and no SIGBUS at a
// later store. False: the kernel is too old to say (before 5.14). Throws Error (kOutOfMemory).
bool populate_pages(std::byte* data, uint64_t bytes);

// Replaces the pages that hold these bytes, which begin a page, by private ones of the same
// contents. Throws Error (kOutOfMemory).
void make_private(std::byte* data, uint64_t bytes);

// Reference by which another process maps the memory; trivially copyable, travels between ranks.
struct SharedMemoryRef {
  uint64_t bytes = 0;
  uint64_t inode = 0;  // guards against a reused pid or descriptor
  int32_t pid = 0;
  int32_t fd = -1;
};

// Memory that other processes of this host can map. It never has a name in a file system (memfd),
// so nothing is left behind however a process ends, and the size of /dev/shm does not bound it.
class SharedMemory {
 public:
  SharedMemory() = default;
  // Returns zero-filled memory. Throws Error (kOutOfMemory).
  [[nodiscard]] static SharedMemory create(uint64_t bytes);
  // Maps another process's (or this one's) memory by /proc/<pid>/fd. Throws Error (kNotAvailable)
  // with the reason, also for a file that is no such memory. `is_handed_on`: ref() is then this
  // process's own.
  [[nodiscard]] static SharedMemory open(const SharedMemoryRef& ref, bool is_handed_on = false);

  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] uint64_t bytes() const { return ref_.bytes; }
  [[nodiscard]] const SharedMemoryRef& ref() const { return ref_; }

 private:
  Pages data_;
  SharedMemoryRef ref_ = {};
  Descriptor fd_;  // only the creator and a process that hands it on have one
};

}  // namespace weft
