// SPDX-License-Identifier: Apache-2.0
#include "group/map_pages.hpp"

#include <cerrno>
#include <sys/mman.h>

#include "core/check.hpp"

namespace weft {
namespace {

constexpr uint64_t kLargePageBytes = uint64_t{2} << 20;
#ifdef MADV_POPULATE_WRITE
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;
#endif

void* map_at(void* address, int fd, uint64_t bytes) {
  const int flags =
      (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED) | (address == nullptr ? 0 : MAP_FIXED);
  return ::mmap(address, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
}

// Address space a large page too long, then what is wanted on the boundary inside it, then the ends
// given back.
void* map_on_boundary(int fd, uint64_t bytes) {
  const uint64_t span = (bytes + 4095) / 4096 * 4096 + kLargePageBytes;
  void* const space =
      ::mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) {
    return MAP_FAILED;
  }
  auto* const begin = static_cast<std::byte*>(space);
  const uint64_t head = (0 - reinterpret_cast<uintptr_t>(begin)) % kLargePageBytes;
  void* const data = map_at(begin + head, fd, bytes);
  if (data == MAP_FAILED) {
    const int reason = errno;
    ::munmap(space, span);
    errno = reason;
    return MAP_FAILED;
  }
  if (head > 0) {
    ::munmap(space, head);
  }
  ::munmap(begin + head + span - kLargePageBytes, kLargePageBytes - head);
  static_cast<void>(::madvise(data, bytes, MADV_HUGEPAGE));  // best effort
  return data;
}

}  // namespace

std::byte* map_pages(int fd, uint64_t bytes, ErrorCode code) {
  void* const data =
      bytes < kLargePageBytes ? map_at(nullptr, fd, bytes) : map_on_boundary(fd, bytes);
  WEFT_CHECK(
      Context{},
      data != MAP_FAILED,
      code,
      "map: no {} B of memory ({})",
      bytes,
      errno_text("mmap", errno)
  );
  return static_cast<std::byte*>(data);
}

bool populate_pages(std::byte* data, uint64_t bytes) {
  int result = 0;
  do {
    result = ::madvise(data, bytes, kPopulateWrite);
  } while (result == -1 && (errno == EINTR || errno == EAGAIN));
  if (result == -1 && errno == EINVAL) {
    return false;
  }
  WEFT_CHECK(
      Context{},
      result == 0,
      ErrorCode::kOutOfMemory,
      "allocate: no room for {} B ({})",
      bytes,
      errno_text("madvise", errno)
  );
  return true;
}

}  // namespace weft
