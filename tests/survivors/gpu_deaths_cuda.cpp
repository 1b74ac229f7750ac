// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unistd.h>
#include <vector>

#include "core/clock.hpp"
#include "gpu/graph_rank.hpp"
#include "group/control_plane.hpp"
#include "support/run_case.hpp"
#include "survivors/gpu_deaths.hpp"
#include "survivors/shared.hpp"
#include "survivors/spare.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

constexpr int kHung = 128 + SIGALRM;
constexpr std::chrono::seconds kBound(90);  // of a rank's life
constexpr int kRoundsAfter = 3;             // that are made after the last death

int64_t nanoseconds() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

ExchangeSetup setup_of(const GpuDeaths& deaths) {
  RandomSource random(deaths.seed);
  ExchangeSetup setup;
  setup.num_ranks = deaths.num_ranks;
  setup.num_gpus = deaths.num_gpus;
  setup.domain_of = deaths.domain_of;
  setup.copy_engines = deaths.copy_engines;
  setup.transport = "ofi";  // between domains
  setup.num_experts = 2 * deaths.num_ranks;
  setup.hidden = 64;
  setup.timeout = 20s;
  setup.has_own_stream = deaths.is_replayed || random.below(2) == 0;
  return setup;
}

// Returns replicas for two experts a rank: the next rank's first, and the second of the one after.
std::vector<int32_t> copies_of_neighbours(int num_ranks) {
  std::vector<int32_t> placement;
  for (int rank = 0; rank < num_ranks; ++rank) {
    placement.push_back((rank + 1) % num_ranks * 2);
    placement.push_back(num_ranks == 2 ? -1 : (rank + 2) % num_ranks * 2 + 1);
  }
  return placement;
}

// None, planned or given, for seeds after each other.
Balancing balancing_of(const GpuDeaths& deaths) {
  const uint64_t kind = deaths.seed % 3;
  if (kind == 0 || !deaths.domain_of.empty()) {
    return {};
  }
  Balancing balancing = {.replicas = 2, .min_rows = 3};
  balancing.block_rows = deaths.seed % 2 == 0 ? 1 : 4;
  if (kind == 2) {
    balancing.placement = copies_of_neighbours(deaths.num_ranks);
  }
  return balancing;
}

// Returns the case of calls that all ranks make.
Case spec_of(const GpuDeaths& deaths) {
  RandomSource random(deaths.seed + 1);
  constexpr Layout kLayouts[] = {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided};
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
  spec.num_tokens.assign(static_cast<size_t>(deaths.num_ranks), 40);
  spec.balance = balancing_of(deaths);
  spec.is_routed = !deaths.is_replayed && random.below(2) == 0;
  if (deaths.is_replayed || spec.is_routed) {
    spec.rows = spec.layout == Layout::kExpertStrided ? 60 : 240;
  }
  return spec;
}

// Ranks that die, and the cases of a group by who is lost.
class Fates {
 public:
  explicit Fates(const GpuDeaths& deaths) : setup_(setup_of(deaths)), spec_(spec_of(deaths)) {
    RandomSource random(deaths.seed + 3);
    const auto ranks = static_cast<size_t>(deaths.num_ranks);
    if (deaths.num_returns > 0) {
      for (int death = 0; death < deaths.num_returns; ++death) {
        victims_.push_back(static_cast<int>(random.below(ranks)));
      }
      return;
    }
    victims_.resize(ranks);
    std::iota(victims_.begin(), victims_.end(), 0);
    for (size_t i = ranks - 1; i > 0; --i) {
      std::swap(victims_[i], victims_[random.below(i + 1)]);
    }
    victims_.pop_back();
  }

  [[nodiscard]] const ExchangeSetup& setup() const { return setup_; }
  [[nodiscard]] size_t num_deaths() const { return victims_.size(); }
  [[nodiscard]] int victim(size_t death) const { return victims_[death]; }
  [[nodiscard]] const CaseData& without(const std::vector<int>& lost) {
    const auto found = cases_.find(lost);
    if (found != cases_.end()) {
      return found->second;
    }
    Case spec = spec_;
    spec.lost = lost;  // hear() has sorted them
    for (const int rank : lost) {
      spec.num_tokens[static_cast<size_t>(rank)] = 0;
    }
    return cases_.emplace(lost, make_case_data(setup_, spec)).first->second;
  }

 private:
  ExchangeSetup setup_;
  Case spec_;
  std::vector<int> victims_;  // in order
  std::map<std::vector<int>, CaseData> cases_;
};

// Times of one death and of the return after it, in nanoseconds of the clock; 0 for none.
struct Death {
  std::atomic<int64_t> death = 0;
  std::array<std::atomic<int64_t>, kMostDyingRanks> heard = {};  // by rank
  Letter letter = {};
  std::atomic<int64_t> rejoin = 0;
  std::array<std::atomic<int64_t>, kMostDyingRanks> together = {};  // by rank
};
struct Deaths {
  std::array<Death, kMostDeaths> of = {};
  std::atomic<int> num_done = 0;  // ranks that have made all their calls
};

// From `begin` until the last of these.
double ms_until(
    const std::atomic<int64_t>& begin, const std::array<std::atomic<int64_t>, kMostDyingRanks>& ends
) {
  int64_t latest = 0;
  for (const auto& end : ends) {
    latest = std::max(latest, end.load());
  }
  return static_cast<double>(latest - begin) / 1e6;
}

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

// Graphs are right after a new process has come.
bool do_graphs_last(const GpuDeaths& deaths) {
  return std::string_view(deaths.transport) == "vmm";
}

// A rank of a group, or the new process in the place of one.
class Life {
 public:
  // `death` has gone before.
  Life(const GpuDeaths& deaths, Deaths& times, std::optional<size_t> death)
      : deaths_(deaths), times_(times), fates_(deaths), next_(death ? *death + 1 : 0) {
    // The new process has called what it captured, while the others replayed what they had.
    num_rounds_ = death && deaths.is_replayed && do_graphs_last(deaths) ? 1 : 0;
  }

  // Returns what is wrong, or nothing. `are_all_there` is called once the rank is one of them.
  [[nodiscard]] std::string run(const Group& group, const std::function<void()>& are_all_there) {
    rank_ = group.rank();
    ExchangeConfig config = fates_.setup().config(rank_);
    config.on_peer_loss = PeerLoss::kShrink;
    exchange_.emplace(make_exchange(group, fates_.setup(), config));
    round_.emplace(*exchange_, fates_.without({}), deaths_.is_replayed);
    are_all_there();
    while (next_ < fates_.num_deaths() || num_rounds_ < kRoundsAfter) {
      if (next_ < fates_.num_deaths() && fates_.victim(next_) == rank_) {
        die_once();
      }
      try {
        if (std::string problem = round_->run(fates_.without(lost_)); !problem.empty()) {
          return fmt::format("after {} deaths: {}", next_, problem);
        }
        ++num_rounds_;
        if (comes_back() && next_ > 0 && lost_.empty()) {
          int64_t none = 0;
          times_.of[next_ - 1].together[at()].compare_exchange_strong(none, nanoseconds());
        }
        if (comes_back() && !lost_.empty()) {
          call_back();
        }
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kRanksLost || !hear()) {
          return fmt::format(
              "after {} deaths, with {} alive: {}",
              next_,
              fmt::join(exchange_->report().alive, ","),
              error.what()
          );
        }
      }
    }
    for (times_.num_done += 1; comes_back() && times_.num_done < deaths_.num_ranks;) {
      std::this_thread::sleep_for(1ms);  // who left would be lost to those that are not as far
    }
    return {};
  }

 private:
  [[nodiscard]] size_t at() const { return static_cast<size_t>(rank_); }
  [[nodiscard]] bool comes_back() const { return deaths_.num_returns > 0; }

  // Kills this process soon; where new processes come back, once it has begun to make rounds, too.
  void die_once() {
    if (is_dying_ || (comes_back() && num_rounds_ < 2)) {
      return;
    }
    is_dying_ = true;
    RandomSource random(deaths_.seed + 10 + next_);
    die_soon(times_.of[next_].death, std::chrono::microseconds(random.between(0, 60'000)));
  }

  // False unless exactly those are lost that have died.
  [[nodiscard]] bool hear() {
    num_rounds_ = 0;
    const std::vector<int> alive = exchange_->report().alive;
    const size_t num_lost = static_cast<size_t>(deaths_.num_ranks) - alive.size();
    if (num_lost <= lost_.size()) {
      return false;
    }
    while (lost_.size() < num_lost && next_ < fates_.num_deaths()) {
      times_.of[next_].heard[at()] = nanoseconds();
      lost_.push_back(fates_.victim(next_++));
    }
    std::ranges::sort(lost_);
    return std::ranges::none_of(lost_, [&](int rank) {
      return std::ranges::binary_search(alive, rank);
    });
  }

  void call_back() {
    if (exchange_->report().alive.front() == rank_) {
      times_.of[next_ - 1].letter.send(*exchange_);
    }
    exchange_->readmit(lost_);
    lost_.clear();
    num_rounds_ = 0;
    if (deaths_.is_replayed && !do_graphs_last(deaths_)) {
      round_.emplace(*exchange_, fates_.without({}), true);  // addresses have changed
    }
  }

  GpuDeaths deaths_;
  Deaths& times_;
  Fates fates_;
  size_t next_;         // death
  int num_rounds_ = 0;  // among the same ranks
  bool is_dying_ = false;
  std::vector<int> lost_;
  int rank_ = 0;
  std::optional<Exchange> exchange_;
  std::optional<Round> round_;
};

int verdict_of(Life& life, const Group& group, const std::function<void()>& are_all_there) {
  std::string problem;
  try {
    problem = life.run(group, are_all_there);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (!problem.empty()) {
    fmt::print(stderr, "rank {}: {}\n", group.rank(), problem);
  }
  return problem.empty() ? 0 : 1;
}

void begin_process(const GpuDeaths& deaths) {
  ::alarm(static_cast<unsigned>(kBound.count()));
  ::setenv("WEFT_GPU_TRANSPORT", deaths.transport, 1);
}

}  // namespace

void reach_gpu(const ExchangeSetup& setup, int rank) {
  WEFT_CUDA(Context{}, cudaSetDevice(setup.config(rank).device.index));
  WEFT_CUDA(Context{}, cudaFree(nullptr));
}

GroupOfDeaths run_deaths(const GpuDeaths& deaths) {
  const Shared<Deaths> times;
  const Fates fates(deaths);
  std::vector<std::unique_ptr<Spare>> spares;
  for (size_t death = 0; deaths.num_returns > 0 && death < fates.num_deaths(); ++death) {
    spares.push_back(std::make_unique<Spare>([&, death] {
      begin_process(deaths);
      const int rank = fates.victim(death);
      reach_gpu(fates.setup(), rank);
      const char* const invitation = times->of[death].letter.await();
      times->of[death].rejoin = nanoseconds();
      Life life(deaths, *times, death);
      return verdict_of(life, Group::rejoin(rank, invitation), [] {});
    }));
  }
  std::vector<int> statuses = run_forked(
      deaths.num_ranks,
      [&](const Group& group) {
        begin_process(deaths);
        Life life(deaths, *times, std::nullopt);
        return verdict_of(life, group, [&] { group.barrier(); });
      },
      {.notice = 2 * kBound}
  );
  const bool are_founders_good = std::ranges::none_of(statuses, [](int status) {
    return status != 0 && status != 128 + SIGKILL;
  });
  for (auto& spare : spares) {
    if (!are_founders_good) {
      spare->kill();
    }
    statuses.push_back(spare->status());
  }
  GroupOfDeaths group;
  group.num_hung = static_cast<int>(std::ranges::count(statuses, kHung));
  const auto num_killed = std::ranges::count(statuses, 128 + SIGKILL);
  const auto num_good = std::ranges::count(statuses, 0);
  const auto num_deaths = static_cast<std::ptrdiff_t>(fates.num_deaths());
  const bool is_good = are_founders_good && num_killed == num_deaths &&
                       num_good == std::ssize(statuses) - num_deaths;
  group.num_wrong = is_good || group.num_hung > 0 ? 0 : 1;
  if (!is_good) {
    fmt::print(
        stderr, "seed {}: the processes ended with {}\n", deaths.seed, fmt::join(statuses, ", ")
    );
  }
  for (size_t death = 0; is_good && death < fates.num_deaths(); ++death) {
    const Death& one = times->of[death];
    group.ms.push_back(ms_until(one.death, one.heard));
    if (deaths.num_returns > 0) {
      group.return_ms.push_back(ms_until(one.rejoin, one.together));
    }
  }
  return group;
}

}  // namespace weft::test
