// SPDX-License-Identifier: Apache-2.0
// Processes that take the places of lost ranks, and how they are called.
#pragma once

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "support/errors.hpp"
#include "weft/exchange.hpp"

namespace weft::test {

// Invitation in memory that processes share: a rank that is left calls a new process with it.
class Letter {
 public:
  void send(const Exchange& exchange) { send(exchange.invitation()); }
  void send(const std::string& invitation) {
    invitation.copy(text_.data(), text_.size() - 1);
    is_there_.store(true);
  }
  [[nodiscard]] const char* await() const {
    while (!is_there_.load()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return text_.data();
  }

 private:
  std::array<char, 2048> text_ = {};
  std::atomic<bool> is_there_ = false;
};

// A process that is no rank yet.
class Spare {
 public:
  explicit Spare(const std::function<int()>& body) : pid_(::fork()) {
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      int status = 1;
      const auto thrown = thrown_by([&] { status = body(); });
      if (thrown) {
        fmt::print(stderr, "{}\n", text_of(thrown));
      }
      ::_exit(thrown ? 1 : status);
    }
  }
  void kill() const { static_cast<void>(::kill(pid_, SIGKILL)); }
  // 128 + signal if it was killed.
  [[nodiscard]] int status() const {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

 private:
  pid_t pid_;
};

}  // namespace weft::test
