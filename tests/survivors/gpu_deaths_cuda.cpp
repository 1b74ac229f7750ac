// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <unistd.h>

#include "core/clock.hpp"
#include "gpu/graph_rank.hpp"
#include "group/control_plane.hpp"
#include "support/run_case.hpp"
#include "survivors/gpu_deaths.hpp"
#include "survivors/shared.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

constexpr int kHung = 128 + SIGALRM;
constexpr std::chrono::seconds kBound(90);  // of a rank's life
constexpr int kRoundsAfter = 2;             // that the last rank makes

int64_t nanoseconds() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

ExchangeSetup setup_of(const GpuDeaths& deaths) {
  RandomSource random(deaths.seed);
  ExchangeSetup setup;
  setup.num_ranks = deaths.num_ranks;
  setup.num_gpus = deaths.num_gpus;
  setup.num_experts = 2 * deaths.num_ranks;
  setup.hidden = 64;
  setup.timeout = 20s;
  setup.has_own_stream = deaths.is_replayed || random.below(2) == 0;
  return setup;
}

// The cases of a group, in order of the deaths: the first has lost nobody.
class Stages {
 public:
  explicit Stages(const GpuDeaths& deaths) : setup_(setup_of(deaths)) {
    RandomSource random(deaths.seed + 1);
    order_.resize(static_cast<size_t>(deaths.num_ranks));
    std::iota(order_.begin(), order_.end(), 0);
    for (size_t i = order_.size() - 1; i > 0; --i) {
      std::swap(order_[i], order_[random.below(i + 1)]);
    }
    constexpr Layout kLayouts[] = {
        Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided};
    Case spec;
    spec.seed = deaths.seed + 2;
    spec.topk = 3;
    spec.layout = kLayouts[random.below(3)];
    spec.output = random.below(2) == 0 ? OutputMemory::kDirect : OutputMemory::kStaged;
    spec.hole_fraction = random.below(2) == 0 ? 0.2 : 0;
    spec.dtype = DType::kBFloat16;
    spec.scale = spec.layout != Layout::kRankMajor && random.below(2) == 0
                     ? CombineScale::kPlanWeights
                     : CombineScale::kNone;
    spec.num_tokens.assign(order_.size(), 40);
    spec.is_routed = !deaths.is_replayed && random.below(2) == 0;
    if (deaths.is_replayed || spec.is_routed) {
      spec.rows = spec.layout == Layout::kExpertStrided ? 60 : 240;
    }
    for (const int rank : order_) {
      cases_.push_back(make_case_data(setup_, spec));
      spec.lost.push_back(rank);
      spec.num_tokens[static_cast<size_t>(rank)] = 0;
    }
  }

  [[nodiscard]] const ExchangeSetup& setup() const { return setup_; }
  [[nodiscard]] size_t num_deaths() const { return order_.size() - 1; }
  [[nodiscard]] int victim(size_t death) const { return order_[death]; }
  [[nodiscard]] const CaseData& at(size_t stage) const { return cases_[stage]; }
  [[nodiscard]] std::vector<int> alive(size_t stage) const {
    std::vector<int> alive(order_.begin() + static_cast<std::ptrdiff_t>(stage), order_.end());
    std::ranges::sort(alive);
    return alive;
  }

 private:
  ExchangeSetup setup_;
  std::vector<int> order_;
  std::vector<CaseData> cases_;
};

// Plan, dispatch and combine by one rank, eager or replayed; what differs from the reference.
class Round {
 public:
  Round(Exchange& exchange, const CaseData& first, bool is_replayed) : exchange_(exchange) {
    if (!is_replayed) {
      return;
    }
    stream_ = std::make_unique<TestStream>(exchange.config().device);
    rank_ = std::make_unique<GraphRank>(exchange, first);
    rank_->make_calls(first, stream_->get());
    stream_->wait();
    exchange.check();
    graph_ = std::make_unique<Graph>(*stream_, [&] { rank_->make_calls(first, stream_->get()); });
  }

  [[nodiscard]] std::string run(const CaseData& data) {
    if (!graph_) {
      return run_cases(exchange_, {&data, 1});
    }
    rank_->load(data);
    graph_->launch();
    stream_->wait();
    exchange_.check();
    return rank_->difference(data);
  }

 private:
  Exchange& exchange_;
  std::unique_ptr<TestStream> stream_;
  std::unique_ptr<GraphRank> rank_;
  std::unique_ptr<Graph> graph_;
};

void die_soon(std::atomic<int64_t>& when, std::chrono::microseconds delay) {
  std::thread([&when, delay] {
    std::this_thread::sleep_for(delay);
    when = nanoseconds();
    std::raise(SIGKILL);
  }).detach();
}

std::string live(const Group& group, const GpuDeaths& deaths, DeathTimes& times) {
  const Stages stages(deaths);
  const int rank = group.rank();
  ExchangeConfig config = stages.setup().config(rank);
  config.on_peer_loss = PeerLoss::kShrink;
  Exchange exchange(group, config);
  Round round(exchange, stages.at(0), deaths.is_replayed);
  RandomSource random(deaths.seed + 10 + static_cast<uint64_t>(rank));
  const std::chrono::microseconds delay(random.between(0, 60'000));
  group.barrier();
  bool is_dying = false;
  int num_after = 0;
  for (size_t stage = 0; num_after < kRoundsAfter;) {
    if (stage < stages.num_deaths() && stages.victim(stage) == rank && !is_dying) {
      is_dying = true;
      die_soon(times.death[stage], delay);
    }
    try {
      if (const std::string problem = round.run(stages.at(stage)); !problem.empty()) {
        return fmt::format("after {} deaths: {}", stage, problem);
      }
      num_after += stage == stages.num_deaths() ? 1 : 0;
    } catch (const Error& error) {
      const CallReport report = exchange.report();
      const size_t now = stages.num_deaths() + 1 - report.alive.size();
      if (error.code() != ErrorCode::kRanksLost || now <= stage ||
          report.alive != stages.alive(now)) {
        return fmt::format(
            "after {} deaths, with {} alive: {}", stage, fmt::join(report.alive, ","), error.what()
        );
      }
      for (; stage < now; ++stage) {
        times.heard[stage][static_cast<size_t>(rank)] = nanoseconds();
      }
    }
  }
  return {};
}

}  // namespace

int live_through_deaths(const Group& group, const GpuDeaths& deaths, DeathTimes& times) {
  ::alarm(static_cast<unsigned>(kBound.count()));
  std::string problem;
  try {
    problem = live(group, deaths, times);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (!problem.empty()) {
    fmt::print(stderr, "rank {}, seed {}: {}\n", group.rank(), deaths.seed, problem);
  }
  return problem.empty() ? 0 : 1;
}

GroupOfDeaths run_deaths(const GpuDeaths& deaths) {
  const Shared<DeathTimes> times;
  const auto statuses = run_forked(
      deaths.num_ranks,
      [&](const Group& group) { return live_through_deaths(group, deaths, *times); },
      {.notice = 2 * kBound}
  );
  GroupOfDeaths group;
  group.num_hung = static_cast<int>(std::ranges::count(statuses, kHung));
  const auto num_killed = std::ranges::count(statuses, 128 + SIGKILL);
  const bool is_good = std::ranges::count(statuses, 0) == 1 && num_killed == deaths.num_ranks - 1;
  group.num_wrong = is_good || group.num_hung > 0 ? 0 : 1;
  for (size_t death = 0; is_good && death + 1 < statuses.size(); ++death) {
    int64_t latest = 0;
    for (const auto& heard : times->heard[death]) {
      latest = std::max(latest, heard.load());
    }
    group.ms.push_back(static_cast<double>(latest - times->death[death]) / 1e6);
  }
  return group;
}

}  // namespace weft::test
