// SPDX-License-Identifier: Apache-2.0
// Runs a body on every rank of a new group: in child processes, or in threads.

#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <iostream>
#include <optional>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "core/check.hpp"
#include "core/clock.hpp"
#include "core/env.hpp"
#include "core/log.hpp"
#include "group/control_plane.hpp"
#include "group/tcp/rendezvous.hpp"
#include "weft/error.hpp"
#include "weft/group.hpp"

namespace weft {
namespace {

constexpr timespec kTick = {0, 100'000'000};
constexpr int kSignalStatus = 128;
// Time in which two signals count as one request: to signal a process and its group sends us two.
constexpr auto kOneWish = std::chrono::seconds(1);

// While in scope, SIGCHLD, SIGINT and SIGTERM wait for sigtimedwait().
class HeldSignals {
 public:
  HeldSignals() {
    sigemptyset(&held_);
    sigaddset(&held_, SIGCHLD);
    for (const int signal : {SIGINT, SIGTERM}) {
      struct sigaction action = {};
      sigaction(signal, nullptr, &action);
      if (action.sa_handler != SIG_IGN) {
        sigaddset(&held_, signal);
      }
    }
    pthread_sigmask(SIG_BLOCK, &held_, &before_);
    struct sigaction by_default = {};
    by_default.sa_handler = SIG_DFL;  // an ignored SIGCHLD would lose the statuses
    sigaction(SIGCHLD, &by_default, &child_action_);
  }
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;
  ~HeldSignals() { release(); }

  void release() const {
    sigaction(SIGCHLD, &child_action_, nullptr);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

  // Returns the next signal, or nothing after a tick.
  [[nodiscard]] std::optional<siginfo_t> next() const {
    siginfo_t info = {};
    return sigtimedwait(&held_, &info, &kTick) > 0 ? std::optional(info) : std::nullopt;
  }

 private:
  sigset_t held_ = {};
  sigset_t before_ = {};
  struct sigaction child_action_ = {};
};

void print_error(int rank, const char* text) {
  std::cout.flush();
  fmt::print(stderr, "rank {}: {}\n", rank, text);
}

int run_body(
    const Rendezvous& rendezvous, Socket listener, const std::function<int(Group&)>& body
) {
  try {
    Group group = connect_group(rendezvous, std::move(listener));
    const int status = body(group);
    return status >= 0 && status <= 255 ? status : 1;
  } catch (const std::exception& error) {
    print_error(rendezvous.rank, error.what());
  } catch (...) {
    print_error(rendezvous.rank, "an exception of unknown type");
  }
  return 1;
}

[[noreturn]] void live_as_child(
    pid_t parent,
    const Rendezvous& rendezvous,
    Socket listener,
    const std::function<int(Group&)>& body
) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) {  // it died before prctl()
    _exit(kSignalStatus + SIGKILL);
  }
  const int status = run_body(rendezvous, std::move(listener), body);
  std::cout.flush();
  std::fflush(nullptr);
  _exit(status);  // what the parent registered to run at its exit is not the child's
}

// Waits for the children, passes signals on and sees to it that none outlives a failure for long.
class Nursery {
 public:
  Nursery(const HeldSignals& signals, const ForkLimits& limits)
      : signals_(signals), limits_(limits) {}

  void add(pid_t pid) {
    pids_.push_back(pid);
    statuses_.push_back(-1);
  }

  void send(int signal) const {
    for (size_t i = 0; i < pids_.size(); ++i) {
      if (statuses_[i] < 0) {
        kill(pids_[i], signal);
      }
    }
  }

  std::vector<int> wait() {
    while (reap()) {
      enforce();
      if (const auto info = signals_.next(); info && info->si_signo != SIGCHLD) {
        pass_on(*info);
      }
    }
    return statuses_;
  }

 private:
  // Collects the children that have ended. True while some still run.
  bool reap() {
    for (size_t i = 0; i < pids_.size(); ++i) {
      int status = 0;
      if (statuses_[i] < 0 && waitpid(pids_[i], &status, WNOHANG) == pids_[i]) {
        statuses_[i] = WIFSIGNALED(status) ? kSignalStatus + WTERMSIG(status) : WEXITSTATUS(status);
        if (statuses_[i] != 0 && !end_) {
          end_ = Deadline(limits_.notice);
        }
      }
    }
    return std::ranges::any_of(statuses_, [](int status) { return status < 0; });
  }

  void enforce() {
    if (end_ && end_->has_passed()) {
      send(is_terminated_ ? SIGKILL : SIGTERM);
      is_terminated_ = true;
      end_ = Deadline(limits_.terminate);
    }
  }

  void pass_on(const siginfo_t& info) {
    const bool is_repeated = info.si_signo == last_signal_;
    if (is_repeated && Clock::now() - last_time_ < kOneWish) {
      return;
    }
    last_signal_ = info.si_signo;
    last_time_ = Clock::now();
    // A terminal's Ctrl-C has reached the children already.
    const bool is_from_terminal = info.si_signo == SIGINT && info.si_code == SI_KERNEL;
    if (is_repeated) {
      send(SIGKILL);
    } else if (!is_from_terminal) {
      send(info.si_signo);
    }
  }

  const HeldSignals& signals_;
  const ForkLimits limits_;
  std::vector<pid_t> pids_;
  std::vector<int> statuses_;  // by rank, -1 while it runs
  std::optional<Deadline> end_;
  bool is_terminated_ = false;
  int last_signal_ = 0;
  Clock::time_point last_time_;
};

}  // namespace

std::vector<int> run_forked(int num_ranks, const std::function<int(Group&)>& body) {
  return run_forked(num_ranks, body, ForkLimits{});
}

std::vector<int> run_forked(
    int num_ranks, const std::function<int(Group&)>& body, const ForkLimits& limits
) {
  const auto secret = random_value<std::array<char, 32>>();
  Rendezvous rendezvous = {.rank = 0, .num_ranks = num_ranks};
  rendezvous.secret.assign(secret.begin(), secret.end());
  rendezvous.timeout = Env::read().timeout;
  // The port is open before any rank connects, so no other program can take it.
  Socket listener = listen_on(rendezvous.address, 0, {});
  rendezvous.port = port_of(listener);
  check_rendezvous(rendezvous);

  const HeldSignals signals;
  Nursery nursery(signals, limits);
  const pid_t parent = getpid();
  std::cout.flush();
  std::fflush(nullptr);  // or each child would write it again
  for (; rendezvous.rank < num_ranks; ++rendezvous.rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      signals.release();
      if (rendezvous.rank != 0) {
        listener.close();
      }
      live_as_child(parent, rendezvous, std::move(listener), body);
    }
    if (pid < 0) {
      const int error = errno;
      nursery.send(SIGKILL);
      static_cast<void>(nursery.wait());
      raise_error(ErrorCode::kNotAvailable, {}, errno_text("run_forked: fork()", error));
    }
    nursery.add(pid);
  }
  listener.close();
  return nursery.wait();
}

void run_threads(int num_ranks, const std::function<void(Group&)>& body) {
  std::vector<Group> groups = Group::local(num_ranks);
  std::vector<std::exception_ptr> causes(groups.size());
  std::vector<std::exception_ptr> echoes(groups.size());  // of a cause on another rank
  {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < groups.size(); ++i) {
      threads.emplace_back([&, i, group = std::move(groups[i])]() mutable {
        Group own = std::move(group);  // gone when the body ends, so that no peer waits for it
        set_log_rank(own.rank(), own.num_ranks());
        try {
          body(own);
        } catch (const PeerError&) {
          echoes[i] = std::current_exception();
        } catch (...) {
          causes[i] = std::current_exception();
        }
      });
    }
  }
  causes.insert(causes.end(), echoes.begin(), echoes.end());
  for (const std::exception_ptr& error : causes) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

}  // namespace weft
