// SPDX-License-Identifier: Apache-2.0
// System calls that are refused, as by an old kernel or by a container's filter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <optional>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace weft::test {

// From now on the call fails in this process, with this error, or only where its third argument is
// `third`. False: this machine has no filters.
[[nodiscard]] inline bool refuse(long call, int error, std::optional<int> third = {}) {
  const uint32_t where =
      third ? offsetof(seccomp_data, args) + 2 * sizeof(uint64_t) : offsetof(seccomp_data, nr);
  const auto what = static_cast<uint32_t>(third.value_or(static_cast<int>(call)));
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, where),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, what, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program = {.len = std::size(filter), .filter = filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// The exit status of a process that runs `body`.
[[nodiscard]] inline int status_of(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);  // never left behind
    ::_exit(body());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// A test that needs refuse() is skipped where this is false.
[[nodiscard]] inline bool can_refuse() {
  return status_of([] { return refuse(SYS_pidfd_open, 1) ? 0 : 1; }) == 0;
}

}  // namespace weft::test
