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
#include <regex>
#include <unistd.h>
#include <vector>

#include "cli/choices.hpp"
#include "core/check.hpp"
#include "core/gpu/devices.hpp"

namespace weft::program {
namespace {

// What went wrong on one rank, on its way to the process that started it. Trivially copyable.
struct Failure {
  int rank = 0;
  bool is_echo = false;              // of another rank's failure: its peer left, died or was late
  std::array<char, 2000> text = {};  // below PIPE_BUF; what is longer is cut
};

Failure failure_of(int rank, const std::exception& error) {
  Failure failure = {.rank = rank};
  std::strncpy(failure.text.data(), error.what(), failure.text.size() - 1);
  if (const auto* ours = dynamic_cast<const Error*>(&error)) {
    const ErrorCode code = ours->code();
    failure.is_echo = code == ErrorCode::kPeerFailed || code == ErrorCode::kTimeout ||
                      code == ErrorCode::kTransport;
  }
  return failure;
}

// What went wrong on which ranks, said once. Ranks send it, threads and forked processes alike:
// each failure is one atomic write, so they need no lock; a full pipe loses some rather than hold a
// dying rank.
class Failures {
 public:
  Failures() {
    WEFT_SYS(Context{}, ErrorCode::kNotAvailable, pipe2(ends_.data(), O_NONBLOCK | O_CLOEXEC));
    static_cast<void>(fcntl(ends_[1], F_SETPIPE_SZ, 1 << 20));  // room for all ranks
  }
  Failures(const Failures&) = delete;
  Failures& operator=(const Failures&) = delete;
  ~Failures() {
    close(ends_[0]);
    close(ends_[1]);
  }

  void send(const Failure& failure) {
    static_cast<void>(!write(ends_[1], &failure, sizeof failure));
  }

  void add_killed(int rank, int signal) {
    Entry& entry = entry_of(fmt::format("killed {}", rank));
    entry.text =
        fmt::format("rank {} was ended by signal {} ({})", rank, signal, strsignal(signal));
    entry.ranks = {rank};
  }

  // What ranks have sent, and who was killed before: one line on stderr per distinct reason. Echoes
  // are left out where a rank said what began it; a killed rank cannot say it, so there they are
  // shown.
  void print(const std::string& command) {
    Failure failure;
    while (read(ends_[0], &failure, sizeof failure) == static_cast<ssize_t>(sizeof failure)) {
      add(failure);
    }
    for (Entry& entry : entries_) {
      if (entry.is_echo && has_cause_) {
        continue;
      }
      std::ranges::sort(entry.ranks);
      const std::string who = fmt::format(" (so say ranks {})", fmt::join(entry.ranks, ", "));
      fmt::print(stderr, "weft {}: {}{}\n", command, entry.text, entry.ranks.size() > 1 ? who : "");
    }
  }

 private:
  struct Entry {
    std::string common;  // what texts of several ranks share
    std::string text;
    bool is_echo = false;
    std::vector<int> ranks;
  };

  Entry& entry_of(const std::string& common) {
    const auto found = std::ranges::find(entries_, common, &Entry::common);
    return found != entries_.end() ? *found : entries_.emplace_back(Entry{common, {}, false, {}});
  }

  void add(const Failure& failure) {
    // Without its speaker and without the rank it came from, as in
    // "... on rank 0 [rank 2/4, shm] at file:line".
    static const std::regex speaker(R"((,? on rank \d+)? \[rank \d+/\d+.*$)");
    const std::string text = failure.text.data();
    Entry& entry = entry_of(std::regex_replace(text, speaker, ""));
    if (entry.text.empty() || text.size() < entry.text.size()) {
      entry.text = text;
    }
    entry.is_echo = failure.is_echo;
    entry.ranks.push_back(failure.rank);
    has_cause_ = has_cause_ || !failure.is_echo;
  }

  std::array<int, 2> ends_ = {-1, -1};
  bool has_cause_ = false;
  std::vector<Entry> entries_;
};

// The ranks' exit statuses.
std::vector<int> run_and_catch(
    const RankOptions& options, const std::function<int(Group&)>& body, Failures& failures
) {
  const auto guarded = [&](Group& group) {
    int status = 1;
    try {
      status = body(group);
    } catch (const std::exception& error) {
      failures.send(failure_of(group.rank(), error));
    }
    const bool is_written = std::fflush(nullptr) == 0 && std::ferror(stdout) == 0;
    return is_written ? status : 1;
  };
  if (!options.use_threads) {
    std::fflush(nullptr);
    return run_forked(options.num_ranks, guarded);
  }
  std::vector<int> statuses(static_cast<size_t>(options.num_ranks), 1);
  run_threads(options.num_ranks, [&](Group& group) {
    statuses[static_cast<size_t>(group.rank())] = guarded(group);
  });
  return statuses;
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
    const std::vector<int> statuses = run_and_catch(options, body, failures);
    for (size_t rank = 0; rank < statuses.size(); ++rank) {
      if (statuses[rank] > 128) {
        failures.add_killed(static_cast<int>(rank), statuses[rank] - 128);
      }
    }
    failures.print(options.command);
    is_good = std::ranges::count(statuses, 0) == std::ssize(statuses);
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

bool is_on_gpus(const std::string& device) {
  return device == "cuda" || (device == "auto" && !list_gpus().gpus.empty());
}

void take_all_gpus(const CLI::App& command, RankOptions& ranks) {
  ranks.use_threads = true;
  if (command.count("--ranks") == 0) {
    ranks.num_ranks = std::max(1, static_cast<int>(list_gpus().gpus.size()));
  }
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
