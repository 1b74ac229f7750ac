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
#include <regex>
#include <span>
#include <unistd.h>
#include <vector>

#include "cli/choices.hpp"
#include "core/check.hpp"
#include "core/gpu/devices.hpp"
#include "group/shared_memory.hpp"
#include "transport/transport.hpp"

namespace weft::program {
namespace {

// Failure of one rank.
struct Failure {
  bool is_set = false;
  bool is_echo = false;              // of another rank's failure: its peer left, died or was late
  std::array<char, 4000> text = {};  // what is longer is cut
};

// Failures of all ranks. Each rank, thread or forked process, has a place of its own in shared
// memory.
class Failures {
 public:
  explicit Failures(int num_ranks)
      : memory_(SharedMemory::create(static_cast<uint64_t>(num_ranks) * sizeof(Failure))),
        failures_(reinterpret_cast<Failure*>(memory_.data()), static_cast<size_t>(num_ranks)) {}

  void set(int rank, const std::exception& error) {
    Failure& failure = failures_[static_cast<size_t>(rank)];
    std::strncpy(failure.text.data(), error.what(), failure.text.size() - 1);
    if (const auto* ours = dynamic_cast<const Error*>(&error)) {
      const ErrorCode code = ours->code();
      failure.is_echo = code == ErrorCode::kPeerFailed || code == ErrorCode::kTimeout ||
                        code == ErrorCode::kTransport;
    }
    failure.is_set = true;
  }

  // One line on stderr per distinct reason. Echoes are left out where a rank said what began it; a
  // killed rank cannot say it, so there they are shown.
  void print(const std::string& command, std::span<const int> statuses) {
    for (size_t rank = 0; rank < failures_.size(); ++rank) {
      if (const int signal = statuses[rank] - 128; signal > 0) {
        add(rank,
            fmt::format("rank {} was ended by signal {} ({})", rank, signal, strsignal(signal)));
      }
    }
    const auto is_cause = [](const Failure& one) { return one.is_set && !one.is_echo; };
    const bool has_cause = std::ranges::any_of(failures_, is_cause);
    for (size_t rank = 0; rank < failures_.size(); ++rank) {
      if (failures_[rank].is_set && (is_cause(failures_[rank]) || !has_cause)) {
        add(rank, failures_[rank].text.data());
      }
    }
    for (const Reason& reason : reasons_) {
      const auto who = fmt::format(" (so say ranks {})", fmt::join(reason.ranks, ", "));
      fmt::print(
          stderr, "weft {}: {}{}\n", command, reason.text, reason.ranks.size() > 1 ? who : ""
      );
    }
  }

 private:
  struct Reason {
    std::string common;  // what texts of several ranks share
    std::string text;    // the shortest
    std::vector<size_t> ranks;
  };

  void add(size_t rank, const std::string& text) {
    // Without its speaker and without the rank it came from, as in
    // "... on rank 0 [rank 2/4, shm] at file:line".
    static const std::regex speaker(R"((,? on rank \d+)? \[rank \d+/\d+.*$)");
    const std::string common = std::regex_replace(text, speaker, "");
    auto found = std::ranges::find(reasons_, common, &Reason::common);
    if (found == reasons_.end()) {
      found = reasons_.insert(found, {common, text, {}});
    }
    found->text = text.size() < found->text.size() ? text : found->text;
    found->ranks.push_back(rank);
  }

  SharedMemory memory_;
  std::span<Failure> failures_;
  std::vector<Reason> reasons_;
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
      failures.set(group.rank(), error);
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
constexpr unsigned kProbeSeconds = 30;

}  // namespace

void add_transport_option(CLI::App& command, std::string& name) {
  const auto problem = [](const std::string& word) {
    std::vector<std::string> known = transport_names();
    known.insert(known.begin(), "auto");
    const std::string first = word.substr(0, word.find(':'));  // "ofi:tcp", "faulty:shm?seed=1"
    const bool is_known = first == "faulty" || std::ranges::count(known, first) > 0;
    return is_known ? "" : fmt::format("\"{}\" is not one of {}", word, fmt::join(known, ", "));
  };
  add_value(command, "--transport", name, "As listed by `weft info`")->check(problem);
}

std::string ask_processes(int num_ranks, const std::function<std::string(Group&)>& question) {
  constexpr size_t kAnswerBytes = 4096;
  const SharedMemory shared = SharedMemory::create(kAnswerBytes);
  auto* answer = reinterpret_cast<char*>(shared.data());
  const auto statuses = run_forked(num_ranks, [&](Group& group) {
    const std::string text = question(group);
    if (group.rank() == 0) {
      text.copy(answer, kAnswerBytes - 1);
    }
    return 0;
  });
  const bool is_good = std::ranges::count(statuses, 0) == num_ranks;
  return is_good ? answer : "the processes that were asked did not answer";
}

void add_rank_options(CLI::App& command, RankOptions& options) {
  options.command = command.get_name();
  add_number(command, "--ranks", options.num_ranks, 1, kMostRanks, "Ranks to run on this machine");
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
    Failures failures(options.num_ranks);
    const std::vector<int> statuses = run_and_catch(options, body, failures);
    failures.print(options.command, statuses);
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
  add_value(command, "--device", choice.wanted, "auto, cpu or cuda; auto: GPUs if there are any")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
}

void choose_device(DeviceChoice& choice, const std::string& transport) {
  const bool is_cpu_transport = transport != "auto" && transport != "peer";
  choice.num_gpus = 0;
  if (choice.wanted == "cpu" || (choice.wanted == "auto" && is_cpu_transport)) {
    return;
  }
  // A GPU has 8 queues by default for all streams of all ranks on it.
  static_cast<void>(::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0));
  // The number of GPUs, or why there are none.
  const std::string found = ask_processes(1, [](const Group&) {
    ::alarm(kProbeSeconds);
    const GpuList list = list_gpus();
    return list.gpus.empty() ? list.none_reason : std::to_string(list.gpus.size());
  });
  choice.num_gpus = parse_number<int>(found).value_or(0);
  WEFT_CHECK(
      Context{},
      choice.is_on_gpu() || choice.wanted == "auto",
      ErrorCode::kNotAvailable,
      "device: there is no GPU ({})",
      found
  );
}

void take_all_gpus(const CLI::App& command, const DeviceChoice& choice, RankOptions& ranks) {
  ranks.use_threads = true;
  if (command.count("--ranks") == 0) {
    ranks.num_ranks = choice.num_gpus;
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
