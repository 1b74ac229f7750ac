// SPDX-License-Identifier: Apache-2.0
// How long after a death does the call end on all who are left (PeerLoss::kShrink), how long does a
// new process need to take the place, and what does that readiness cost while nobody dies?
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <iterator>
#include <string>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "cli/progress.hpp"
#include "cli/standard_streams.hpp"
#include "core/clock.hpp"
#include "group/control_plane.hpp"
#include "measure/measure.hpp"
#include "measure/results.hpp"
#include "measure/workload.hpp"
#include "report/json_text.hpp"
#include "support/run_case.hpp"
#include "survive_gpus.hpp"
#include "survivors/shared.hpp"
#include "survivors/survivors.hpp"
#include "weft/exchange.hpp"

namespace weft::bench {
namespace {

using program::rounded;
using Json = nlohmann::ordered_json;

constexpr int kDeathRanks = 8;
constexpr int kHung = 128 + SIGALRM;
constexpr std::chrono::seconds kBound(120);  // of a rank's life

// On one host or, by the network of this one, on four.
test::ExchangeSetup eight_ranks(bool are_in_domains) {
  test::ExchangeSetup setup;
  setup.num_ranks = kDeathRanks;
  setup.num_experts = 2 * kDeathRanks;
  setup.transport = are_in_domains ? "ofi:tcp" : "shm";
  for (int rank = 0; rank < kDeathRanks && are_in_domains; ++rank) {
    setup.domain_of.push_back(rank / 2);
  }
  return setup;
}

std::string transport_of(const test::ExchangeSetup& setup) {
  return setup.transport.substr(0, setup.transport.find(':'));
}

Exchange shrinking(const Group& group, const test::ExchangeSetup& setup) {
  ExchangeConfig config = setup.config();
  config.on_peer_loss = PeerLoss::kShrink;
  return test::make_exchange(group, setup, config);
}

// --- deaths ---

// Times that the ranks of one death tell the parent: nanoseconds of the clock, 0 for none.
struct Times {
  std::atomic<int64_t> death = 0;
  std::array<std::atomic<int64_t>, kDeathRanks> end = {};
};

int64_t nanoseconds() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

// A rank of one death. The victim dies by itself at a random moment; the others make rounds until
// they have heard of it, and one more; these two rounds are compared with the reference.
int live(const Group& group, const test::ExchangeSetup& setup, uint64_t seed, Times& times) {
  const test::SurvivorRounds rounds(setup, {});
  ::alarm(static_cast<unsigned>(kBound.count()));
  Exchange exchange = shrinking(group, setup);
  RandomSource random(seed);
  const auto victim = static_cast<int>(random.below(kDeathRanks));
  const std::chrono::microseconds delay(random.between(0, 100'000));
  group.barrier();
  if (group.rank() == victim) {
    std::thread([&times, delay] {
      std::this_thread::sleep_for(delay);
      times.death = nanoseconds();
      std::raise(SIGKILL);
    }).detach();
  }
  std::atomic<int64_t>& end = times.end[static_cast<size_t>(group.rank())];
  std::string problem;
  for (uint64_t number = 0, num_after = 0; num_after < 2 && problem.empty(); ++number) {
    const auto round = rounds.call(exchange, seed + number, [&](int /*call*/) {
      if (end == 0 && !exchange.report().lost.empty()) {
        end = nanoseconds();
      }
    });
    if (end != 0) {
      ++num_after;
      problem = rounds.problem_of(round, group.rank());
    }
  }
  if (!problem.empty()) {
    std::cerr << problem << std::endl;
  }
  return problem.empty() ? 0 : 1;
}

Json measure_deaths(const test::ExchangeSetup& setup, int num_deaths, uint64_t seed) {
  std::vector<double> ms;
  int num_wrong = 0;
  int num_hung = 0;
  program::Progress progress("deaths");
  for (int death = 0; death < num_deaths; ++death) {
    progress.update(static_cast<double>(death) / num_deaths);
    const test::Shared<Times> times;
    const auto body = [&](const Group& group) {
      return live(group, setup, seed + static_cast<uint64_t>(death) * 1000, *times);
    };
    const auto statuses = run_forked(kDeathRanks, body, {.notice = 2 * kBound});
    num_hung += std::ranges::count(statuses, kHung) > 0 ? 1 : 0;
    const auto num_good = std::ranges::count(statuses, 0);
    if (num_good != kDeathRanks - 1) {
      num_wrong += std::ranges::count(statuses, kHung) > 0 ? 0 : 1;
      continue;
    }
    int64_t latest = 0;
    for (const auto& end : times->end) {
      latest = std::max(latest, end.load());
    }
    ms.push_back(static_cast<double>(latest - times->death) / 1e6);
  }
  return {
      {"op", "death"},
      {"executor", "cpu"},
      {"transport", transport_of(setup)},
      {"ranks", kDeathRanks},
      {"deaths", num_deaths},
      {"wrong", num_wrong},
      {"hung", num_hung},
      {"ms_p50", rounded(program::percentile(ms, 50), 1)},
      {"ms_p99", rounded(program::percentile(ms, 99), 1)},
  };
}

// --- readmissions ---

// Memory through which the ranks of one readmission tell each other times: nanoseconds of the
// clock, 0 for none.
struct Return {
  std::array<char, 2048> invitation = {};
  std::atomic<bool> is_invited = false;
  std::atomic<int64_t> begin = 0;                          // the new process calls rejoin
  std::array<std::atomic<int64_t>, kDeathRanks> end = {};  // the first call with it
};

// The first round of all ranks, as each of them makes it.
int go_on_together(
    Exchange& exchange, const test::ExchangeSetup& setup, uint64_t seed, Return& times
) {
  const test::SurvivorRounds rounds(setup, {});
  const std::string problem = rounds.run(exchange, seed, [&](int call) {
    if (call == 1) {
      times.end[static_cast<size_t>(exchange.rank())] = nanoseconds();
    }
  });
  if (!problem.empty()) {
    std::cerr << problem << std::endl;
  }
  return problem.empty() && exchange.report().alive.size() == kDeathRanks ? 0 : 1;
}

[[noreturn]] void come_back(
    int rank, const test::ExchangeSetup& setup, uint64_t seed, Return& times
) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::alarm(static_cast<unsigned>(kBound.count()));
  while (!times.is_invited) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  int status = 1;
  try {
    times.begin = nanoseconds();
    Exchange exchange = shrinking(Group::rejoin(rank, times.invitation.data()), setup);
    status = go_on_together(exchange, setup, seed, times);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
  }
  ::_exit(status);
}

int await_return(
    const Group& group, const test::ExchangeSetup& setup, int victim, uint64_t seed, Return& times
) {
  ::alarm(static_cast<unsigned>(kBound.count()));
  Exchange exchange = shrinking(group, setup);
  const test::SurvivorRounds rounds(setup, {});
  std::string problem = rounds.run(exchange, seed, [&](int call) {
    if (call == 1 && group.rank() == victim) {
      std::raise(SIGKILL);
    }
  });
  if (exchange.report().alive.front() == group.rank()) {
    exchange.invitation().copy(times.invitation.data(), times.invitation.size() - 1);
    times.is_invited = true;
  }
  exchange.readmit(std::array{victim});
  const int status = go_on_together(exchange, setup, seed + 1, times);
  return problem.empty() ? status : 1;
}

Json measure_readmissions(const test::ExchangeSetup& setup, int num_returns, uint64_t seed) {
  std::vector<double> ms;
  int num_wrong = 0;
  int num_hung = 0;
  RandomSource random(seed);
  program::Progress progress("readmissions");
  for (int number = 0; number < num_returns; ++number) {
    progress.update(static_cast<double>(number) / num_returns);
    const test::Shared<Return> times;
    const auto victim = static_cast<int>(random.below(kDeathRanks));
    const uint64_t own_seed = seed + static_cast<uint64_t>(number) * 1000;
    const pid_t spare = ::fork();
    if (spare == 0) {
      come_back(victim, setup, own_seed + 1, *times);
    }
    const auto body = [&](const Group& group) {
      return await_return(group, setup, victim, own_seed, *times);
    };
    auto statuses = run_forked(kDeathRanks, body, {.notice = 2 * kBound});
    int status = 0;
    ::waitpid(spare, &status, 0);
    statuses[static_cast<size_t>(victim)] =
        WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    const bool is_hung = std::ranges::count(statuses, kHung) > 0;
    num_hung += is_hung ? 1 : 0;
    if (std::ranges::count(statuses, 0) != kDeathRanks) {
      num_wrong += is_hung ? 0 : 1;
      continue;
    }
    int64_t latest = 0;
    for (const auto& end : times->end) {
      latest = std::max(latest, end.load());
    }
    ms.push_back(static_cast<double>(latest - times->begin) / 1e6);
  }
  return {
      {"op", "readmission"},
      {"executor", "cpu"},
      {"transport", transport_of(setup)},
      {"ranks", kDeathRanks},
      {"readmissions", num_returns},
      {"wrong", num_wrong},
      {"hung", num_hung},
      {"ms_p50", rounded(program::percentile(ms, 50), 1)},
      {"ms_p99", rounded(program::percentile(ms, 99), 1)},
  };
}

// --- what it costs while nobody dies ---

struct CostCase {
  char name;
  int64_t tokens;  // of each rank
  int iterations;
};

constexpr int64_t kHidden = 7168;
constexpr int kExperts = 256;
constexpr int kTopk = 8;
constexpr int kCostRanks = 2;

// One exchange with its data, of one rank.
class Contender {
 public:
  Contender(
      const Group& group,
      const test::ExchangeSetup& setup,
      const CostCase& shape,
      int64_t hidden,
      PeerLoss on_peer_loss
  )
      : input_(program::make_input(workload(shape, hidden), group.rank())),
        exchange_(test::make_exchange(group, setup, config(setup, shape, hidden, on_peer_loss))) {
    const Plan plan = exchange_.plan(input_.routing());
    rows_ = exchange_.allocate(plan.num_rows(), hidden, DType::kBFloat16);
    x_ = program::Matrix(DType::kBFloat16, plan.num_tokens(), hidden);
  }

  // Microseconds of plan, dispatch and combine.
  double run() {
    const program::Stopwatch watch;
    const Plan plan = exchange_.plan(input_.routing());
    exchange_.dispatch(plan, {.x = input_.x.view()}, {.rows = rows_.tensor()});
    exchange_.combine(plan, {.rows = rows_.tensor()}, {.x = x_.view()});
    return watch.microseconds();
  }

 private:
  static program::Workload workload(const CostCase& shape, int64_t hidden) {
    program::Workload workload;
    workload.num_tokens.assign(kCostRanks, shape.tokens);
    workload.hidden = hidden;
    workload.routing.num_experts = kExperts;
    workload.routing.topk = kTopk;
    return workload;
  }
  static ExchangeConfig config(
      const test::ExchangeSetup& setup, const CostCase& shape, int64_t hidden, PeerLoss on_peer_loss
  ) {
    ExchangeConfig config;
    config.hidden = hidden;
    config.max_tokens = shape.tokens;
    config.num_experts = kExperts;
    config.max_topk = kTopk;
    config.transport = setup.transport;
    config.num_threads = 1;
    config.on_peer_loss = on_peer_loss;
    return config;
  }

  program::RankInput input_;
  Exchange exchange_;
  Buffer rows_;
  program::Matrix x_;
};

// Both in turns, which of them is first too. The difference is the median over the pairs.
Json measure_cost(const CostCase& shape, int64_t hidden, bool are_in_domains) {
  test::ExchangeSetup setup;
  setup.num_ranks = kCostRanks;
  setup.transport = are_in_domains ? "ofi:tcp" : "loopback";
  if (are_in_domains) {
    setup.domain_of = {0, 1};
  }
  std::vector<double> fail;
  std::vector<double> shrink;
  run_threads(kCostRanks, [&](const Group& group) {
    program::Progress progress(fmt::format("cost in case {}", shape.name), group.rank() == 0);
    Contender without(group, setup, shape, hidden, PeerLoss::kFail);
    Contender with(group, setup, shape, hidden, PeerLoss::kShrink);
    std::array<std::vector<double>, 2> mine;
    for (int i = -1; i < shape.iterations; ++i) {
      progress.update(static_cast<double>(i + 1) / shape.iterations);
      for (int turn = 0; turn < 2; ++turn) {
        const auto which = static_cast<size_t>((i + 1 + turn) % 2);
        group.barrier();
        const double us = which == 0 ? without.run() : with.run();
        if (i >= 0) {  // the first pair warms up
          mine[which].push_back(us);
        }
      }
    }
    const auto of_fail = program::slowest_of(group, mine[0]);
    const auto of_shrink = program::slowest_of(group, mine[1]);
    if (group.rank() == 0) {
      fail = of_fail;
      shrink = of_shrink;
    }
  });
  std::vector<double> more;
  std::ranges::transform(shrink, fail, std::back_inserter(more), std::minus());
  const double us_fail = program::percentile(fail, 50);
  const double us_more = program::percentile(more, 50);
  return {
      {"op", "shrink_cost"},
      {"executor", "cpu"},
      {"transport", transport_of(setup)},
      {"case", std::string(1, shape.name)},
      {"ranks", kCostRanks},
      {"tokens", shape.tokens},
      {"hidden", hidden},
      {"experts", kExperts},
      {"topk", kTopk},
      {"dtype", "bfloat16"},
      {"samples", shape.iterations},
      {"us_p50", rounded(program::percentile(shrink, 50), 1)},
      {"us_p50_fail", rounded(us_fail, 1)},
      {"more_us", rounded(us_more, 1)},
      {"more_percent", rounded(100 * us_more / us_fail, 2)},
  };
}

void print(const Json& rows) {
  for (const Json& row : rows) {
    std::string line;
    for (const auto& [key, value] : row.items()) {
      line += fmt::format("{}{} {}", line.empty() ? "" : ", ", key, value.dump());
    }
    fmt::print("{}\n", line);
  }
}

struct Asked {
  DeathCounts counts = {.deaths = 200, .returns = 200};
  int samples = 50;
  uint64_t seed = 1;
  bool is_on_gpus = false;
  bool is_smoke = false;
  std::string json_path;
};

void add_options(CLI::App& app, Asked& asked) {
  app.add_option("--deaths", asked.counts.deaths, "How many deaths; 0: none")
      ->capture_default_str();
  app.add_option("--readmissions", asked.counts.returns, "How many of them; 0: none")
      ->capture_default_str();
  app.add_option(
         "--samples", asked.samples, "Of the cost in case A; case D has 20 times as many; 0: none"
  )
      ->capture_default_str();
  app.add_option("--seed", asked.seed, "Of deaths and readmissions")->capture_default_str();
  app.add_flag(
      "--gpus",
      asked.is_on_gpus,
      "On the GPUs of this host; eager calls and graphs are counted apart"
  );
  app.add_flag("--domains", asked.counts.are_in_domains, "Ranks are in several domains");
  app.add_option(
      "--limit-seconds", asked.counts.seconds, "On GPUs: no group of processes begins after so long"
  );
  app.add_option("--json", asked.json_path, "Write the results to this file");
  app.add_flag("--smoke", asked.is_smoke, "Small, as a test");
}

// The rows of a run, which are in its file as far as they have come.
class Rows {
 public:
  explicit Rows(std::string json_path) : json_path_(std::move(json_path)) {}

  [[nodiscard]] const Json& all() const { return rows_; }
  void add(const Json& more) {
    Json all = rows_;
    all.insert(all.end(), more.begin(), more.end());
    set(all);
  }
  void set(const Json& rows) {
    rows_ = rows;
    if (json_path_.empty()) {
      return;
    }
    const auto save = [this](const Group& /*alone*/) {
      program::save_results(json_path_, rows_, {});
      return 0;
    };
    // It asks CUDA for the GPUs, and who has used CUDA must not fork ranks that use it.
    static_cast<void>(run_forked(1, save));
  }

 private:
  std::string json_path_;
  Json rows_ = Json::array();
};

void measure_on_gpus(const Asked& asked, Rows& rows) {
  if (asked.counts.deaths + asked.counts.returns > 0) {  // first: it forks
    measure_gpu_deaths(asked.counts, asked.seed, [&](const Json& latest) { rows.set(latest); });
  }
  if (asked.samples > 0) {
    rows.add(measure_gpu_cost(asked.samples, asked.is_smoke, asked.counts.are_in_domains));
  }
}

void measure_on_cpus(const Asked& asked, Rows& rows) {
  const test::ExchangeSetup setup = eight_ranks(asked.counts.are_in_domains);
  if (asked.counts.deaths > 0) {
    rows.add(Json::array({measure_deaths(setup, asked.counts.deaths, asked.seed)}));
  }
  if (asked.counts.returns > 0) {
    rows.add(Json::array({measure_readmissions(setup, asked.counts.returns, asked.seed)}));
  }
  if (asked.samples > 0) {
    const int64_t hidden = asked.is_smoke ? 256 : kHidden;
    const CostCase a = {.name = 'A', .tokens = 512, .iterations = asked.samples};
    const CostCase d = {.name = 'D', .tokens = 128, .iterations = 20 * asked.samples};
    rows.add(Json::array(
        {measure_cost(a, hidden, asked.counts.are_in_domains),
         measure_cost(d, hidden, asked.counts.are_in_domains)}
    ));
  }
}

int run(int argc, char** argv) {
  CLI::App app(
      "How soon do survivors go on, and a new process with them, and what does it cost to be ready "
      "for that?"
  );
  Asked asked;
  add_options(app, asked);
  CLI11_PARSE(app, argc, argv);
  if (asked.is_smoke) {
    asked.counts.deaths = std::min(asked.counts.deaths, 2);
    asked.counts.returns = std::min(asked.counts.returns, 2);
    asked.samples = std::min(asked.samples, 2);
  }
  ::setenv("WEFT_LOG", "error", 0);  // each loss is a warning
  Rows rows(asked.json_path);
  asked.is_on_gpus ? measure_on_gpus(asked, rows) : measure_on_cpus(asked, rows);
  print(rows.all());
  const bool is_good = std::ranges::all_of(rows.all(), [](const Json& row) {
    return row.value("wrong", 0) == 0 && row.value("hung", 0) == 0;
  });
  return is_good ? 0 : 1;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::program::open_standard_streams();
  try {
    return weft::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
