// SPDX-License-Identifier: Apache-2.0
#include "schedules/run.hpp"

#include <fmt/format.h>

#include <optional>
#include <utility>
#include <vector>

#include "call/executor.hpp"
#include "cpu/exchange.hpp"
#include "support/errors.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTimeout{1000};  // of the scheduler's time; ranks have up to four times it

// Choices that a seed makes before anything runs.
struct Scene {
  ExchangeSetup setup;
  std::vector<std::vector<int>> domains;
  std::vector<CaseData> cases;
  int refuser = -1;  // of a call before the last case
  Misfortune misfortune;
  std::vector<milliseconds> timeouts;  // by rank
};

Scene make_scene(uint64_t seed) {
  RandomSource random(seed);
  Scene scene;
  ExchangeSetup& setup = scene.setup;
  setup.num_ranks = static_cast<int>(random.between(2, 4));
  setup.fan_out = random.below(2) == 0 ? FanOut::kSource : FanOut::kReceiver;
  setup.hidden = 8;
  setup.max_tokens = random.between(1, 40);  // one chunk or two
  setup.num_experts = setup.num_ranks * static_cast<int>(random.between(1, 2));
  setup.max_topk = static_cast<int>(random.between(1, 3));
  scene.domains.resize(setup.num_ranks == 4 && random.below(2) == 0 ? 2 : 1);
  for (int rank = 0; rank < setup.num_ranks; ++rank) {
    scene.domains[static_cast<size_t>(rank) % scene.domains.size()].push_back(rank);
    setup.domain_of.push_back(rank % static_cast<int>(scene.domains.size()));
  }
  for (int64_t left = random.between(1, 2); left > 0; --left) {
    Case spec = random_case(setup, random.next());
    if (spec.layout != Layout::kRankMajor && spec.seed % 2 == 0) {
      spec.order = SumOrder::kTopk;
    }
    scene.cases.push_back(make_case_data(setup, spec));
  }
  const auto any_rank = [&] {
    return static_cast<int>(random.below(static_cast<uint64_t>(setup.num_ranks)));
  };
  scene.refuser = random.below(4) == 0 ? any_rank() : -1;
  const uint64_t kind = random.below(6);
  if (kind < 4) {
    Misfortune& misfortune = scene.misfortune;
    misfortune.victim = any_rank();
    misfortune.at_step = random.between(0, 60);
    misfortune.dies = kind == 0;
    misfortune.loses_put = kind == 1;
    misfortune.stop = milliseconds(kind < 2 ? 0 : random.between(1, 2 * kTimeout.count()));
  }
  for (int rank = 0; rank < setup.num_ranks; ++rank) {
    scene.timeouts.push_back(kTimeout * random.between(1, 4));
  }
  return scene;
}

// Outcome of a run on one rank.
struct RankEnd {
  std::string difference;  // bits that are not the reference's
  std::optional<Thrown> thrown;
  bool is_dead = false;
};

// A call that one rank refuses: all ranks must hear why, and go on.
std::string refuse_one(Exchange& exchange, const Scene& scene) {
  const auto own = static_cast<size_t>(exchange.rank());
  if (exchange.rank() == scene.refuser) {
    exchange.refuse(Op::kPlan, "not today");
    return {};
  }
  const RankRouting& routing = scene.cases.back().routing[own];
  try {
    static_cast<void>(exchange.plan(routing.routing(), routing.options));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) {
      throw;
    }
    const std::string text = error.what();
    const std::string wanted = fmt::format("rank {} refused the call: not today", scene.refuser);
    return text.find(wanted) == std::string::npos ? text : "";
  }
  return "a refused plan was made";
}

void run_calls(Exchange& exchange, const Scene& scene, RankEnd& end) {
  for (size_t i = 0; i < scene.cases.size() && end.difference.empty(); ++i) {
    if (i + 1 == scene.cases.size() && scene.refuser >= 0) {
      end.difference = refuse_one(exchange, scene);
    }
    if (end.difference.empty()) {
      end.difference = run_cases(exchange, {&scene.cases[i], 1});
    }
  }
}

RankEnd run_rank(const Group& group, const Scene& scene, Scheduler& scheduler) {
  const int rank = group.rank();
  RankEnd end;
  const auto make = [&](std::string_view name, const auto&... rest) {
    return scheduler.wrap(make_transport(name, rest...), rank);
  };
  ExchangeConfig config = scene.setup.config(rank);
  config.timeout = scene.timeouts[static_cast<size_t>(rank)];
  std::optional<Exchange> exchange = Executor::exchange_by(
      std::make_unique<CpuExchange>(group, config, CpuPlace{.domains = scene.domains, .make = make})
  );
  scheduler.enter(rank);
  try {
    end.thrown = thrown_by([&] { run_calls(*exchange, scene, end); });
  } catch (const Killed&) {
    end.is_dead = true;
  }
  if (!end.is_dead) {  // the memory of a dead rank stays where its peers have mapped it
    exchange.reset();
  }
  scheduler.leave(rank);
  scheduler.await_end();
  return end;
}

// Why a rank may not have ended so; empty: it may.
std::string fault_of(const RankEnd& end, bool has_struck) {
  if (!end.difference.empty()) {
    return end.difference;
  }
  if (!end.thrown) {
    return {};
  }
  if (!has_struck) {
    return "without a cause: " + end.thrown->text;
  }
  // The brackets at the end name the rank that says it, which does not count.
  const bool names_a_rank =
      end.thrown->text.rfind("rank ", end.thrown->text.rfind(" [")) != std::string::npos;
  const bool is_expected = end.thrown->is_timeout || end.thrown->is_peer_error;
  return names_a_rank && is_expected ? "" : "unexpected: " + end.thrown->text;
}

}  // namespace

ScheduledRun run_schedule(uint64_t seed, Planted planted) {
  const Scene scene = make_scene(seed);
  const Misfortune& misfortune = scene.misfortune;
  Scheduler scheduler(seed, scene.setup.num_ranks, misfortune, planted);
  std::vector<RankEnd> ends(static_cast<size_t>(scene.setup.num_ranks));
  run_threads(scene.setup.num_ranks, [&](const Group& group) {
    ends[static_cast<size_t>(group.rank())] = run_rank(group, scene, scheduler);
  });
  ScheduledRun run = {.story = {}, .failure = scheduler.failure(), .trace = scheduler.trace()};
  run.story = fmt::format(
      "seed {}: {} ranks in {} domains, refuser {}, victim {} at step {} ({}, {} ms), {} ms in all",
      seed,
      scene.setup.num_ranks,
      scene.domains.size(),
      scene.refuser,
      misfortune.victim,
      misfortune.at_step,
      misfortune.dies        ? "dies"
      : misfortune.loses_put ? "loses a put"
                             : "stops",
      misfortune.stop.count(),
      scheduler.time() / milliseconds(1)
  );
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    const RankEnd& end = ends[rank];
    const std::string outcome = end.is_dead ? "died" : end.thrown ? end.thrown->text : "right";
    const std::string fault = fault_of(end, scheduler.has_struck());
    run.story += fmt::format("\n  rank {}: {}", rank, fault.empty() ? outcome : fault);
    if (!fault.empty() && run.failure.empty()) {
      run.failure = fmt::format("rank {}: {}", rank, fault);
    }
  }
  return run;
}

}  // namespace weft::test
