// SPDX-License-Identifier: Apache-2.0
// Runs of random schedules (run.hpp), as many as wanted. Ends with 1 at the first that fails and
// says how to run it again.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "schedules/run.hpp"

int main(int argc, char** argv) {
  uint64_t first = 0;
  uint64_t count = 1;
  unsigned jobs = 1;
  CLI::App app("The CPU executor under schedules that seeds decide");
  app.add_option("--seed", first, "of the first run")->capture_default_str();
  app.add_option("--count", count, "how many runs")->capture_default_str();
  app.add_option("--jobs", jobs, "how many at a time")->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  std::atomic<uint64_t> next = first;
  std::atomic<bool> has_failed = false;
  const auto work = [&] {
    for (uint64_t seed = next++; seed < first + count && !has_failed; seed = next++) {
      const auto run = weft::test::run_schedule(seed);
      if (count == 1) {
        fmt::print("{}\n  trace {:016x}\n", run.story, run.trace);
      } else if ((seed - first + 1) % 10'000 == 0) {
        fmt::print("schedules: {} of {}\n", seed - first + 1, count);
        std::fflush(stdout);
      }
      if (!run.failure.empty()) {
        has_failed = true;
        fmt::print(
            stderr,
            "{}\nschedules: {}\nagain: {} --seed {}\n",
            run.story,
            run.failure,
            argv[0],
            seed
        );
      }
    }
  };
  {
    std::vector<std::jthread> workers;
    for (unsigned i = 0; i < jobs; ++i) {
      workers.emplace_back(work);
    }
  }
  if (!has_failed) {
    fmt::print("schedules: {} runs, right bits or an error that names a rank\n", count);
  }
  return has_failed ? 1 : 0;
}
