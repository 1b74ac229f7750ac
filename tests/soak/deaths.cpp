// SPDX-License-Identifier: Apache-2.0
// Storms of deaths for as long as asked: ranks are killed, stopped, leave, are given up and come
// back at random, and what the others compute is compared with the reference. Ends with 1 if
// anything was wrong or hung; the seed that is named shows the same ranks, calls and events again.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <string>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "core/clock.hpp"
#include "measure/results.hpp"
#include "survivors/shared.hpp"
#include "survivors/storm.hpp"

namespace weft::test {
namespace {

struct Wanted {
  int64_t deaths = 10'000;
  int64_t storms = 0;  // 0: any number
  int64_t seconds = 0;
  uint64_t seed = 1;
  int jobs = 1;
  std::string json;  // empty: none
  StormLimits limits;
};

// Totals of what the jobs have done, by kind.
struct Tally {
  std::atomic<int64_t> begun = 0;
  std::atomic<int64_t> storms = 0;
  std::atomic<int64_t> killed = 0;
  std::atomic<int64_t> stopped = 0;
  std::atomic<int64_t> left = 0;
  std::atomic<int64_t> masked = 0;
  std::atomic<int64_t> returned = 0;
  std::atomic<int64_t> wrong = 0;
  std::atomic<int64_t> hung = 0;

  void add(const StormCount& count) {
    killed += count.killed;
    stopped += count.stopped;
    left += count.left;
    masked += count.masked;
    returned += count.returned;
    wrong += count.wrong;
    hung += count.hung;
  }
  [[nodiscard]] int64_t deaths() const { return killed + stopped + left + masked; }
};

void run_job(const Wanted& wanted, Tally& tally) {
  const Deadline end(std::chrono::seconds(wanted.seconds));
  while (tally.deaths() < wanted.deaths && (wanted.seconds == 0 || !end.has_passed())) {
    const int64_t storm = tally.begun++;
    if (wanted.storms > 0 && storm >= wanted.storms) {
      return;
    }
    tally.add(run_storm(wanted.seed + static_cast<uint64_t>(storm), wanted.limits));
    ++tally.storms;
  }
}

void print(const Tally& tally) {
  fmt::print(
      "soak-deaths: {} storms, {} deaths ({} killed, {} stopped, {} left, {} masked), {} came "
      "back, {} wrong, {} hung\n",
      tally.storms.load(),
      tally.deaths(),
      tally.killed.load(),
      tally.stopped.load(),
      tally.left.load(),
      tally.masked.load(),
      tally.returned.load(),
      tally.wrong.load(),
      tally.hung.load()
  );
  std::fflush(stdout);
}

void save(const Tally& tally, const Wanted& wanted) {
  const nlohmann::ordered_json row = {
      {"op", "storm"},
      {"executor", "cpu"},
      {"transport", wanted.limits.has_domains ? "ofi" : "shm"},
      {"storms", tally.storms.load()},
      {"deaths", tally.deaths()},
      {"killed", tally.killed.load()},
      {"stopped", tally.stopped.load()},
      {"left", tally.left.load()},
      {"masked", tally.masked.load()},
      {"returned", tally.returned.load()},
      {"wrong", tally.wrong.load()},
      {"hung", tally.hung.load()},
  };
  program::save_results(wanted.json, nlohmann::ordered_json::array({row}), {});
}

int run(const Wanted& wanted) {
  const Shared<Tally> tally;
  std::vector<pid_t> jobs;
  for (int job = 0; job < wanted.jobs; ++job) {
    jobs.push_back(::fork());
    if (jobs.back() == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::setenv("WEFT_LOG", "error", 0);
      run_job(wanted, *tally);
      ::_exit(0);
    }
  }
  constexpr auto kShowEvery = std::chrono::seconds(10);
  for (auto next = Clock::now() + kShowEvery; !jobs.empty();) {
    std::erase_if(jobs, [&](pid_t job) {
      int status = 0;
      const bool is_over = job < 0 || ::waitpid(job, &status, WNOHANG) == job;
      tally->wrong += is_over && (job < 0 || status != 0) ? 1 : 0;
      return is_over;
    });
    if (Clock::now() >= next) {
      print(*tally);
      next += kShowEvery;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  print(*tally);
  if (!wanted.json.empty()) {
    save(*tally, wanted);
  }
  return tally->wrong + tally->hung == 0 ? 0 : 1;
}

}  // namespace
}  // namespace weft::test

int main(int argc, char** argv) {
  weft::test::Wanted wanted;
  int64_t deadline_ms = wanted.limits.deadline.count();
  CLI::App app("Soak: ranks are lost at random, every result compared with the reference");
  app.add_option("--deaths", wanted.deaths, "End after so many")->capture_default_str();
  app.add_option("--storms", wanted.storms, "End after so many; 0: any number")
      ->capture_default_str();
  app.add_option("--seconds", wanted.seconds, "End after so long; 0: any time")
      ->capture_default_str();
  app.add_option("--seed", wanted.seed, "Of the first storm")->capture_default_str();
  app.add_option("--jobs", wanted.jobs, "Storms at the same time")->capture_default_str();
  app.add_option("--stops", wanted.limits.stops, "Share of storms with ranks that are stopped")
      ->capture_default_str();
  app.add_option("--returns", wanted.limits.returns, "Share of the others in which ranks come back")
      ->capture_default_str();
  app.add_flag("--domains", wanted.limits.has_domains, "Ranks are in several domains");
  app.add_option("--deadline-ms", deadline_ms, "After which a stopped rank is given up")
      ->capture_default_str();
  app.add_option("--json", wanted.json, "Write what was counted to this file");
  CLI11_PARSE(app, argc, argv);
  wanted.limits.deadline = std::chrono::milliseconds(deadline_ms);
  return weft::test::run(wanted);
}
