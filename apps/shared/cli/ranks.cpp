// SPDX-License-Identifier: Apache-2.0
#include "cli/ranks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <regex>
#include <unistd.h>
#include <vector>

#include "cli/choices.hpp"
#include "core/check.hpp"
#include "core/gpu/devices.hpp"

namespace weft::program {
namespace {

struct Failure {
  int rank = 0;
  bool is_echo = false;  // of another rank's failure: its peer left, died or did not answer
  std::string text;
};

Failure failure_of(int rank, const std::exception& error) {
  Failure failure = {rank, false, error.what()};
  if (const auto* ours = dynamic_cast<const Error*>(&error)) {
    const ErrorCode code = ours->code();
    failure.is_echo = code == ErrorCode::kPeerFailed || code == ErrorCode::kTimeout ||
                      code == ErrorCode::kTransport;
  }
  return failure;
}

// What went wrong on which ranks, said once. Any thread may add.
class Failures {
 public:
  void add(const Failure& failure) {
    // Without its speaker and without the rank it came from, as in
    // "... on rank 0 [rank 2/4, shm] at file:line".
    static const std::regex speaker(R"((,? on rank \d+)? \[rank \d+/\d+.*$)");
    const std::lock_guard lock(mutex_);
    has_cause_ = has_cause_ || !failure.is_echo;
    Entry& entry = entries_[std::regex_replace(failure.text, speaker, "")];
    if (entry.ranks.empty()) {
      order_.push_back(&entry);
    }
    if (entry.text.empty() || failure.text.size() < entry.text.size()) {
      entry.text = failure.text;
    }
    entry.is_echo = failure.is_echo;
    entry.ranks.push_back(failure.rank);
  }

  void add_killed(int rank, int signal) {
    Entry& entry = entries_[fmt::format("killed {}", rank)];
    entry.text =
        fmt::format("rank {} was ended by signal {} ({})", rank, signal, strsignal(signal));
    entry.ranks = {rank};
    order_.push_back(&entry);
  }

  // One line on stderr per distinct reason. Echoes are left out where a rank said what began it; a
  // killed rank cannot say it, so there they are shown.
  void print(const std::string& command) const {
    for (const Entry* entry : order_) {
      if (entry->is_echo && has_cause_) {
        continue;
      }
      std::vector<int> ranks = entry->ranks;
      std::sort(ranks.begin(), ranks.end());
      const std::string who = fmt::format(" (so say ranks {})", fmt::join(ranks, ", "));
      fmt::print(stderr, "weft {}: {}{}\n", command, entry->text, ranks.size() > 1 ? who : "");
    }
  }

 private:
  struct Entry {
    std::string text;
    bool is_echo = false;
    std::vector<int> ranks;
  };

  std::mutex mutex_;
  bool has_cause_ = false;
  std::map<std::string, Entry> entries_;  // by what texts of several ranks have in common
  std::vector<const Entry*> order_;
};

// Brings failures of forked ranks to their parent. Each is one atomic write, so ranks need no
// lock; a full pipe loses some rather than hold a dying rank.
class FailurePipe {
 public:
  FailurePipe() {
    WEFT_SYS(Context{}, ErrorCode::kNotAvailable, pipe2(ends_.data(), O_NONBLOCK | O_CLOEXEC));
  }
  FailurePipe(const FailurePipe&) = delete;
  FailurePipe& operator=(const FailurePipe&) = delete;
  ~FailurePipe() {
    close(ends_[0]);
    close(ends_[1]);
  }

  void send(const Failure& failure) {
    Record record = {failure.rank, failure.is_echo, {}};
    std::strncpy(record.text.data(), failure.text.c_str(), record.text.size() - 1);
    static_cast<void>(!write(ends_[1], &record, sizeof(record)));
  }

  void receive_all(Failures& failures) {
    Record record = {};
    while (read(ends_[0], &record, sizeof(record)) == static_cast<ssize_t>(sizeof(record))) {
      failures.add({record.rank, record.is_echo, record.text.data()});
    }
  }

 private:
  struct Record {
    int rank;
    bool is_echo;
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
    report(failure_of(group.rank(), error));
  }
  const bool is_written = std::fflush(nullptr) == 0 && std::ferror(stdout) == 0;
  return is_written ? status : 1;
}

// Both return true if all ranks ended well.
bool run_processes(
    const RankOptions& options, const std::function<int(Group&)>& body, Failures& failures
) {
  FailurePipe pipe;
  std::fflush(nullptr);
  const std::vector<int> statuses = run_forked(options.num_ranks, [&](Group& group) {
    return guarded(group, body, [&](const Failure& failure) { pipe.send(failure); });
  });
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    if (statuses[rank] > 128) {
      failures.add_killed(static_cast<int>(rank), statuses[rank] - 128);
    }
  }
  pipe.receive_all(failures);
  return statuses == std::vector<int>(statuses.size(), 0);
}

bool run_as_threads(
    const RankOptions& options, const std::function<int(Group&)>& body, Failures& failures
) {
  std::vector<int> statuses(static_cast<size_t>(options.num_ranks), 1);
  run_threads(options.num_ranks, [&](Group& group) {
    statuses[static_cast<size_t>(group.rank())] =
        guarded(group, body, [&](const Failure& failure) { failures.add(failure); });
  });
  return statuses == std::vector<int>(statuses.size(), 0);
}

constexpr int kRanksOnOneGpu = 4;

}  // namespace

void add_rank_options(CLI::App& command, RankOptions& options) {
  options.command = command.get_name();
  add_number(command, "--ranks", options.num_ranks, 1, 64, "Ranks to run on this machine");
  auto* threads = command.add_flag("--threads", options.use_threads, "Ranks are threads");
  command.add_flag("--processes")
      ->description("Ranks are processes (the default)")
      ->excludes(threads);
}

void run_ranks(const RankOptions& options, const std::function<int(Group&)>& body) {
  bool is_good = false;
  if (Group::is_launched()) {
    Group group = Group::from_env();
    is_good = body(group) == 0;
  } else {
    Failures failures;
    is_good = options.use_threads ? run_as_threads(options, body, failures)
                                  : run_processes(options, body, failures);
    failures.print(options.command);
  }
  if (!is_good) {
    throw CLI::RuntimeError(1);
  }
}

Device DeviceChoice::device(int rank) const {
  return is_on_gpu() ? Device{Device::Kind::kCuda, rank % num_gpus} : Device{};
}

void add_device_option(CLI::App& command, DeviceChoice& choice) {
  add_device_word(command, choice.wanted);
}

void choose_device(DeviceChoice& choice, const std::string& transport) {
  const bool is_cpu_transport = transport != "auto" && transport != "peer";
  choice.num_gpus = 0;
  if (choice.wanted == "cpu" || (choice.wanted == "auto" && is_cpu_transport)) {
    return;
  }
  // By default a GPU has 8 queues for all streams of all ranks on it.
  static_cast<void>(::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0));
  const GpuList list = probe_gpus();
  choice.num_gpus = static_cast<int>(list.gpus.size());
  WEFT_CHECK(
      Context{},
      choice.is_on_gpu() || choice.wanted == "auto",
      ErrorCode::kNotAvailable,
      "device: cuda is asked for, but there is no GPU ({})",
      list.none_reason
  );
}

void choose_ranks(const CLI::App& command, const DeviceChoice& choice, RankOptions& ranks) {
  if (choice.is_on_gpu() && command.count("--ranks") == 0) {
    ranks.num_ranks = choice.num_gpus > 1 ? choice.num_gpus : kRanksOnOneGpu;
  }
}

RankOptions with_ranks(const RankOptions& ranks, const DeviceChoice& choice, int num_ranks) {
  RankOptions result = ranks;
  result.num_ranks = num_ranks;
  if (choice.is_on_gpu() && num_ranks > choice.num_gpus) {
    result.use_threads = true;
  }
  return result;
}

}  // namespace weft::program
