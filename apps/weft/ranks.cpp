// SPDX-License-Identifier: Apache-2.0
#include "ranks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

#include "failures.hpp"

namespace weft::program {
namespace {

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

bool run_processes(const RankOptions& options, const std::function<int(Group&)>& body) {
  FailurePipe pipe;
  std::fflush(nullptr);
  const std::vector<int> statuses = run_forked(options.num_ranks, [&](Group& group) {
    return guarded(group, body, [&](const Failure& failure) { pipe.send(failure); });
  });
  Failures failures;
  bool is_good = true;
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    is_good = is_good && statuses[rank] == 0;
    if (statuses[rank] > 128) {
      failures.add_killed(static_cast<int>(rank), statuses[rank] - 128);
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
        guarded(group, body, [&](const Failure& failure) { failures.add(failure); });
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
