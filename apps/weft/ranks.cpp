// SPDX-License-Identifier: Apache-2.0
#include "ranks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <unistd.h>
#include <vector>

#include "core/check.hpp"

namespace weft::program {
namespace {

// What went wrong on which ranks, in the order in which it should be read.
class Failures {
 public:
  // `text` may end in its speaker, as in "... [rank 2/4, shm] at file:line".
  void add(int rank, const std::string& text) {
    std::string key = text;
    if (const size_t at = key.rfind(fmt::format("[rank {}/", rank)); at != std::string::npos) {
      key.erase(at);
    }
    const std::lock_guard lock(mutex_);
    auto& entry = entries_[key];
    if (entry.ranks.empty()) {
      entry.text = text;
      order_.push_back(key);
    }
    entry.ranks.push_back(rank);
  }

  void print(const std::string& command) const {
    for (const std::string& key : order_) {
      const Entry& entry = entries_.at(key);
      const bool is_shared = entry.ranks.size() > 1;
      fmt::print(
          stderr,
          "weft {}: {}{}\n",
          command,
          entry.text,
          is_shared ? fmt::format(" (so say ranks {})", fmt::join(entry.ranks, ", ")) : ""
      );
    }
  }

 private:
  struct Entry {
    std::string text;
    std::vector<int> ranks;
  };
  std::mutex mutex_;
  std::map<std::string, Entry> entries_;
  std::vector<std::string> order_;
};

// Carries the texts of forked ranks to their parent. A text is one atomic write, so ranks need no
// lock; a full pipe loses texts rather than hold a dying rank.
class ErrorPipe {
 public:
  ErrorPipe() {
    WEFT_SYS(Context{}, ErrorCode::kNotAvailable, pipe2(ends_.data(), O_NONBLOCK | O_CLOEXEC));
  }
  ErrorPipe(const ErrorPipe&) = delete;
  ErrorPipe& operator=(const ErrorPipe&) = delete;
  ~ErrorPipe() {
    close(ends_[0]);
    close(ends_[1]);
  }

  void send(int rank, const std::string& text) {
    Record record = {rank, {}};
    std::strncpy(record.text.data(), text.c_str(), record.text.size() - 1);
    static_cast<void>(!write(ends_[1], &record, sizeof(record)));
  }

  void receive_all(Failures& failures) {
    Record record = {};
    while (read(ends_[0], &record, sizeof(record)) == static_cast<ssize_t>(sizeof(record))) {
      failures.add(record.rank, record.text.data());
    }
  }

 private:
  struct Record {
    int rank;
    std::array<char, 2000> text;  // below PIPE_BUF
  };
  std::array<int, 2> ends_ = {-1, -1};
};

// Runs the body and hands what it throws to `report`.
template <class Report>
int guarded(Group& group, const std::function<int(Group&)>& body, const Report& report) {
  int status = 1;
  try {
    status = body(group);
  } catch (const std::exception& error) {
    report(group.rank(), error.what());
  }
  std::fflush(nullptr);
  return status;
}

bool run_processes(const RankOptions& options, const std::function<int(Group&)>& body) {
  ErrorPipe pipe;
  std::fflush(nullptr);
  const std::vector<int> statuses = run_forked(options.num_ranks, [&](Group& group) {
    return guarded(group, body, [&](int rank, const char* text) { pipe.send(rank, text); });
  });
  Failures failures;
  bool is_good = true;
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    is_good = is_good && statuses[rank] == 0;
    if (const int signal = statuses[rank] - 128; signal > 0) {
      const std::string name = strsignal(signal);
      failures.add(
          static_cast<int>(rank),
          fmt::format("rank {} was ended by signal {} ({})", rank, signal, name)
      );
    }
  }
  pipe.receive_all(failures);
  failures.print(options.command);
  return is_good;
}

bool run_as_threads(const RankOptions& options, const std::function<int(Group&)>& body) {
  Failures failures;
  std::vector<int> statuses(static_cast<size_t>(options.num_ranks), 1);
  run_threads(options.num_ranks, [&](Group& group) {
    statuses[static_cast<size_t>(group.rank())] =
        guarded(group, body, [&](int rank, const char* text) { failures.add(rank, text); });
  });
  failures.print(options.command);
  return statuses == std::vector<int>(statuses.size(), 0);
}

}  // namespace

void add_rank_options(CLI::App& command, RankOptions& options) {
  options.command = command.get_name();
  command.add_option("--ranks", options.num_ranks, "Ranks to run on this machine")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  auto* threads = command.add_flag("--threads", options.use_threads, "Ranks are threads");
  command.add_flag("--processes")
      ->description("Ranks are processes (the default)")
      ->excludes(threads);
}

bool is_launched() {
  return Group::is_launched();
}

void run_ranks(const RankOptions& options, const std::function<int(Group&)>& body) {
  bool is_good = false;
  if (is_launched()) {
    Group group = Group::from_env();
    is_good = body(group) == 0;
  } else {
    is_good = options.use_threads ? run_as_threads(options, body) : run_processes(options, body);
  }
  if (!is_good) {
    throw CLI::RuntimeError(1);
  }
}

}  // namespace weft::program
