// SPDX-License-Identifier: Apache-2.0
// Symbols that headers and archives of a newer glibc use and 2.28 does not have. These definitions
// stay inside the module (exports.map).
#include <algorithm>
#include <cstdint>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kLongest =
    int64_t{86'400} * 365 * kSecond;  // what waits longer is woken and looks again

int64_t nanoseconds(const timespec& time) {
  return time.tv_sec * kSecond + time.tv_nsec;
}

int64_t now(clockid_t clock) {
  timespec time = {};
  ::clock_gettime(clock, &time);
  return nanoseconds(time);
}

}  // namespace

extern "C" {

// Functions of glibc 2.33. The system's call fills its structure on machines of 64 bits.
static_assert(sizeof(long) == 8);

int stat(const char* path, struct stat* found) {
  return static_cast<int>(::syscall(SYS_newfstatat, AT_FDCWD, path, found, 0));
}

int lstat(const char* path, struct stat* found) {
  return static_cast<int>(::syscall(SYS_newfstatat, AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW));
}

int fstat(int file, struct stat* found) {
  return static_cast<int>(::syscall(SYS_fstat, file, found));
}

int fstat64(int file, struct stat64* found) {
  return static_cast<int>(::syscall(SYS_fstat, file, found));
}

// glibc has this function from 2.30 on, and it is called where the system has it. An older system
// waits by the wall clock: if that is set back meanwhile, the wait is longer.
int pthread_cond_clockwait(
    pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until
) {
  static const auto own = reinterpret_cast<decltype(&pthread_cond_clockwait)>(
      ::dlsym(RTLD_DEFAULT, "pthread_cond_clockwait")
  );
  if (own != nullptr) {
    return own(condition, mutex, clock, until);
  }
  if (clock == CLOCK_REALTIME) {
    return ::pthread_cond_timedwait(condition, mutex, until);
  }
  const int64_t end = now(CLOCK_REALTIME) + std::min(nanoseconds(*until) - now(clock), kLongest);
  const timespec wall = {.tv_sec = end / kSecond, .tv_nsec = end % kSecond};
  return ::pthread_cond_timedwait(condition, mutex, &wall);
}

// Hint of glibc 2.32; false is always true.
char __libc_single_threaded = 0;  // NOLINT(bugprone-reserved-identifier)

// Function of glibc 2.36, for std::random_device.
uint32_t arc4random() {
  uint32_t value = 0;
  while (::getrandom(&value, sizeof value, 0) != sizeof value) {
  }
  return value;
}
}
