// SPDX-License-Identifier: Apache-2.0
#include "group/shared_memory.hpp"

#include <climits>

#include <array>
#include <cerrno>
#include <fcntl.h>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/available_memory.hpp"
#include "core/check.hpp"
#include "core/descriptor.hpp"

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

// Takes address space a large page too long, maps what is wanted on the boundary inside it, and
// gives the ends back.
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

// Name and seals that tell such memory from any other file: a memfd whose size no process changes.
constexpr std::string_view kName = "weft";
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Repeats a system call that was interrupted or is to be tried again.
template <class SystemCall>
int repeated(const SystemCall& call) {
  int result = call();
  while (result == -1 && (errno == EINTR || errno == EAGAIN)) {
    result = call();
  }
  return result;
}

// For kernels that cannot populate a mapping: reserves the pages of the file, small ones.
void reserve_file(int fd, uint64_t bytes) {
  const int result = repeated([&] { return ::fallocate(fd, 0, 0, static_cast<off_t>(bytes)); });
  WEFT_CHECK(
      Context{},
      result == 0 || errno == EOPNOTSUPP,
      ErrorCode::kOutOfMemory,
      "allocate: no room for {} B of shared memory ({})",
      bytes,
      errno_text("fallocate", errno)
  );
}

}  // namespace

Pages map_pages(int fd, uint64_t bytes, ErrorCode code) {
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
  return {static_cast<std::byte*>(data), UnmapPages{bytes}};
}

bool populate_pages(std::byte* data, uint64_t bytes) {
  const int result = repeated([&] { return ::madvise(data, bytes, kPopulateWrite); });
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

void make_private(std::byte* data, uint64_t bytes) {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t whole = (bytes + page - 1) / page * page;
  void* const copy =
      ::mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  WEFT_CHECK(
      Context{},
      copy != MAP_FAILED,
      ErrorCode::kOutOfMemory,
      "map: no {} B of memory ({})",
      whole,
      errno_text("mmap", errno)
  );
  std::memcpy(copy, data, bytes);
  WEFT_SYS(
      Context{},
      ErrorCode::kInternal,
      ::mremap(copy, whole, whole, MREMAP_MAYMOVE | MREMAP_FIXED, data) == MAP_FAILED ? -1 : 0
  );
}

// Makes every page present at once: faults taken one by one cost more than the zeroing. For 256 MiB
// (Xeon at 2.3 GHz in a virtual machine, 2026-11-20) first touch of lazy pages takes 148 ms.
SharedMemory SharedMemory::create(uint64_t bytes) {
  WEFT_CHECK_ARG(Context{}, bytes > 0, "allocate: 0 B of shared memory (at least 1)");
  Descriptor fd(WEFT_SYS(
      Context{},
      ErrorCode::kOutOfMemory,
      ::memfd_create(kName.data(), MFD_CLOEXEC | MFD_ALLOW_SEALING)
  ));
  check_available(bytes, "shared memory");
  WEFT_SYS(Context{}, ErrorCode::kOutOfMemory, ::ftruncate(fd.get(), static_cast<off_t>(bytes)));
  WEFT_SYS(Context{}, ErrorCode::kInternal, ::fcntl(fd.get(), F_ADD_SEALS, kSeals));
  struct stat info = {};
  WEFT_SYS(Context{}, ErrorCode::kInternal, ::fstat(fd.get(), &info));

  SharedMemory memory;
  memory.data_ = map_pages(fd.get(), bytes, ErrorCode::kOutOfMemory);
  if (!populate_pages(memory.data(), bytes)) {
    reserve_file(fd.get(), bytes);
  }
  memory.ref_ = {
      .bytes = bytes,
      .inode = static_cast<uint64_t>(info.st_ino),
      .pid = ::getpid(),
      .fd = fd.get()};
  memory.fd_ = std::move(fd);
  return memory;
}

// Populates the mapping of a peer's memory: 16 ms for 256 MiB, not 80 ms of faults (as above).
SharedMemory SharedMemory::open(const SharedMemoryRef& ref, bool is_handed_on) {
  const std::string path = fmt::format("/proc/{}/fd/{}", ref.pid, ref.fd);
  std::array<char, PATH_MAX> name = {};
  const bool is_named = ::readlink(path.c_str(), name.data(), name.size() - 1) > 0;
  // Other files are not even opened.
  const bool is_other =
      is_named &&
      std::string_view(name.data()).find(fmt::format("memfd:{}", kName)) == std::string_view::npos;
  Descriptor fd(is_named && !is_other ? ::open(path.c_str(), O_RDWR | O_CLOEXEC) : -1);
  WEFT_CHECK(
      Context{},
      fd.is_open() || is_other,
      ErrorCode::kNotAvailable,
      "map: no access to the memory of process {} ({})",
      ref.pid,
      errno_text(path, errno)
  );
  WEFT_CHECK(
      Context{},
      fd.is_open() && ::fcntl(fd.get(), F_GET_SEALS) == kSeals,
      ErrorCode::kNotAvailable,
      "map: {} is \"{}\" (expected memory of Weft; it was released)",
      path,
      name.data()
  );
  struct stat info = {};
  WEFT_SYS(Context{}, ErrorCode::kNotAvailable, ::fstat(fd.get(), &info));
  WEFT_CHECK(
      Context{},
      static_cast<uint64_t>(info.st_ino) == ref.inode &&
          static_cast<uint64_t>(info.st_size) == ref.bytes,
      ErrorCode::kNotAvailable,
      "map: {} is inode {} of {} B (expected inode {} of {} B; the memory was released)",
      path,
      info.st_ino,
      info.st_size,
      ref.inode,
      ref.bytes
  );
  SharedMemory memory;
  memory.data_ = map_pages(fd.get(), ref.bytes, ErrorCode::kNotAvailable);
  memory.ref_ = ref;
  static_cast<void>(populate_pages(memory.data(), ref.bytes));
  if (is_handed_on) {
    memory.ref_.pid = ::getpid();
    memory.ref_.fd = fd.get();
    memory.fd_ = std::move(fd);
  }
  return memory;
}

}  // namespace weft
