// SPDX-License-Identifier: Apache-2.0
#include "group/process_watch.hpp"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <optional>
#include <poll.h>
#include <sstream>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>

namespace weft {
namespace {

struct Stat {
  bool has_ended = false;  // and is not reaped
  uint64_t begin = 0;      // in clock ticks since boot: no two processes of a pid have the same
};

// Returns what /proc says of a process; nothing if it says nothing.
std::optional<Stat> stat_of(int32_t pid) {
  const Descriptor fd(::open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 1024> text = {};
  if (!fd.is_open() || ::read(fd.get(), text.data(), text.size() - 1) <= 0) {
    return std::nullopt;
  }
  const std::string line = text.data();
  std::istringstream rest(line.substr(line.rfind(')') + 1));  // a name may hold anything
  char state = 0;
  int64_t skipped = 0;
  int64_t num_threads = 0;
  Stat stat;
  rest >> state;
  constexpr int kBetween = 16;  // the state is value 3, the number of threads value 20
  for (int value = 0; value < kBetween; ++value) {
    rest >> skipped;
  }
  rest >> num_threads >> skipped >> stat.begin;
  // A first thread that has ended counts as a zombie while others go on.
  stat.has_ended = (state == 'Z' || state == 'X') && num_threads <= 1;
  return rest ? std::optional(stat) : std::nullopt;
}

}  // namespace

ProcessWatch::ProcessWatch(int32_t pid)
    : fd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))), pid_(pid) {
  if (fd_.is_open()) {
    return;
  }
  had_ended_ = errno == ESRCH;
  const std::optional<Stat> stat = stat_of(pid);
  begin_ = stat ? stat->begin : 0;
}

bool ProcessWatch::is_alive() const {
  if (fd_.is_open()) {
    pollfd entry = {.fd = fd_.get(), .events = POLLIN, .revents = 0};
    return ::poll(&entry, 1, 0) <= 0 || (entry.revents & POLLIN) == 0;
  }
  if (had_ended_ || pid_ <= 0) {
    return !had_ended_;
  }
  if (::kill(pid_, 0) == -1 && errno == ESRCH) {
    return false;
  }
  const std::optional<Stat> now = stat_of(pid_);
  return !now || (!now->has_ended && (begin_ == 0 || now->begin == begin_));
}

}  // namespace weft
