// SPDX-License-Identifier: Apache-2.0
#include "survivors/storm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <optional>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "group/control_plane.hpp"
#include "support/watch.hpp"
#include "survivors/shared.hpp"
#include "survivors/survivors.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

enum class End : uint8_t { kNone, kKilled, kStopped, kLeft, kMasked };
enum class When : uint8_t { kTime, kStep, kLoss };

// What becomes of a rank.
struct Fate {
  End end = End::kNone;
  When when = When::kTime;
  std::chrono::microseconds time = {};
  int step = 0;    // call, from 0
  int masker = 0;  // with kMasked: who gives it up
};

struct Storm {
  uint64_t seed = 0;
  ExchangeSetup setup;
  Case spec;
  std::vector<Fate> fates;  // by rank
  int last = 0;             // the rank that is left
  std::chrono::seconds bound = 120s;
};

constexpr int kMaxRanks = 8;

// What the processes of a storm tell each other.
struct Board {
  std::array<std::atomic<pid_t>, kMaxRanks> pid = {};
};

// Thrown by a rank that leaves between two calls.
struct Leaves {};

template <class T, size_t size>
T pick(RandomSource& random, const std::array<T, size>& values) {
  return values[random.below(size)];
}

// No replicas, or some that each plan chooses, or some that stay where they are.
Balancing random_balance(const ExchangeSetup& setup, RandomSource& random) {
  Balancing balance = {.replicas = static_cast<int>(random.between(0, 2))};
  const int per_rank = setup.num_experts / setup.num_ranks;
  const bool is_fixed = random.below(3) > 0;
  for (int rank = 0; is_fixed && rank < setup.num_ranks; ++rank) {
    std::vector<int32_t> here;
    for (int replica = 0; replica < balance.replicas; ++replica) {
      const auto expert =
          static_cast<int32_t>(random.below(static_cast<uint64_t>(setup.num_experts)));
      const bool may_be =
          expert / per_rank != rank && std::ranges::find(here, expert) == here.end();
      here.push_back(may_be ? expert : -1);
    }
    balance.placement.insert(balance.placement.end(), here.begin(), here.end());
  }
  return balance;
}

Case random_spec(const ExchangeSetup& setup, RandomSource& random) {
  Case spec;
  spec.topk = static_cast<int>(random.between(1, setup.max_topk));
  spec.layout =
      pick(random, std::array{Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided});
  spec.pad_multiple =
      spec.layout == Layout::kRankMajor ? 1 : pick(random, std::array<int64_t, 3>{1, 7, 16});
  const bool may_keep_order = spec.layout != Layout::kRankMajor;
  spec.order = may_keep_order && random.below(3) == 0 ? SumOrder::kTopk : SumOrder::kRank;
  spec.output = pick(random, std::array{OutputMemory::kDirect, OutputMemory::kStaged});
  spec.hole_fraction = pick(random, std::array{0.0, 0.2, 0.9});
  spec.index = pick(random, std::array{IndexKind::kInt32, IndexKind::kInt64});
  spec.balance = random_balance(setup, random);
  return spec;
}

Fate random_fate(const Storm& storm, std::chrono::microseconds span, RandomSource& random) {
  Fate fate;
  fate.end = pick(
      random,
      std::array{End::kKilled, End::kKilled, End::kKilled, End::kKilled, End::kLeft, End::kMasked}
  );
  fate.when = pick(random, std::array{When::kTime, When::kTime, When::kStep, When::kLoss});
  fate.time = std::chrono::microseconds(random.between(0, span.count()));
  fate.step = static_cast<int>(random.between(0, 12));
  fate.masker = static_cast<int>(random.below(static_cast<uint64_t>(storm.setup.num_ranks)));
  return fate;
}

Storm make_storm(uint64_t seed, const StormLimits& limits) {
  RandomSource random(seed);
  Storm storm;
  storm.seed = seed;
  ExchangeSetup& setup = storm.setup;
  setup.num_ranks = static_cast<int>(random.between(2, kMaxRanks));
  setup.transport = "shm";
  setup.num_threads = static_cast<int>(random.between(1, 2));
  setup.fan_out = pick(random, std::array{FanOut::kSource, FanOut::kReceiver});
  setup.hidden = 8 * random.between(1, 12);
  setup.max_tokens = random.between(1, 70);
  setup.num_experts = setup.num_ranks * static_cast<int>(random.between(1, 4));
  setup.max_topk = std::min(4, setup.num_experts);
  storm.spec = random_spec(setup, random);
  storm.last = static_cast<int>(random.below(static_cast<uint64_t>(setup.num_ranks)));
  const bool has_stops = random.uniform() < limits.stops;
  const std::chrono::microseconds span = pick(random, std::array{5'000us, 50'000us, 400'000us});
  for (int rank = 0; rank < setup.num_ranks; ++rank) {
    storm.fates.push_back(random_fate(storm, span, random));
    if (has_stops && random.below(3) == 0) {
      storm.fates.back().end = End::kStopped;
    }
  }
  storm.fates[static_cast<size_t>(storm.last)].end = End::kNone;
  if (has_stops) {
    setup.timeout = limits.deadline;
    storm.bound += 3 * kMaxRanks * std::chrono::ceil<std::chrono::seconds>(limits.deadline);
  }
  return storm;
}

// A rank of a storm, as its process runs it.
class StormRank {
 public:
  StormRank(const Storm& storm, const Group& group, Board& board)
      : storm_(storm),
        rank_(group.rank()),
        fate_(storm.fates[static_cast<size_t>(rank_)]),
        board_(board),
        watch_(1, storm.bound / 2) {
    ExchangeConfig config = storm.setup.config();
    config.on_peer_loss = PeerLoss::kShrink;
    config.on_loss = [this](const CallReport& /*report*/) { meet(fate_.when == When::kLoss); };
    board.pid[static_cast<size_t>(rank_)] = ::getpid();
    ::alarm(static_cast<unsigned>(storm.bound.count()));
    exchange_.emplace(group, config);
    group.barrier();
  }

  // What went wrong; nothing if all is right.
  std::string run() {
    start_clock();
    try {
      return run_rounds();
    } catch (const Leaves&) {
      exchange_.reset();
      std::this_thread::sleep_for(std::chrono::milliseconds(storm_.seed % 3 * 20));
      return "";
    } catch (const PeerError& error) {
      const bool is_told = std::string_view(error.what()).find("was given up by the others") !=
                           std::string_view::npos;
      const bool may_be = fate_.end == End::kStopped || fate_.end == End::kMasked;
      return may_be && is_told ? "" : error.what();
    } catch (const std::exception& error) {
      return error.what();
    }
  }

 private:
  std::string run_rounds() {
    const SurvivorRounds rounds(storm_.setup, storm_.spec);
    for (uint64_t round = 0;; ++round) {
      std::string problem = rounds.run(*exchange_, storm_.seed + round, [&](int call) {
        if (call < 3) {
          begin_step();
        }
      });
      if (!problem.empty()) {
        return problem;
      }
      if (!problem_.empty() || exchange_->report().alive.size() == 1) {
        return problem_;
      }
    }
  }

  void start_clock() {
    if (fate_.end == End::kNone || fate_.end == End::kMasked || fate_.end == End::kLeft) {
      return;
    }
    // Who waits for a loss that does not come is lost all the same.
    const auto after = fate_.when == When::kTime ? fate_.time : fate_.time + 2s;
    std::thread([this, after] {
      std::this_thread::sleep_for(after);
      meet(true);
    }).detach();
  }

  // The fate of this rank, if it is time.
  void meet(bool is_time) {
    if (is_time && fate_.end == End::kKilled) {
      std::raise(SIGKILL);
    }
    if (is_time && fate_.end == End::kStopped && !has_stopped_.exchange(true)) {
      ::kill(::getpid(), SIGSTOP);
    }
  }

  void begin_step() {
    watch_.enter(0, "a call");
    ::alarm(static_cast<unsigned>(storm_.bound.count()));
    const std::vector<int> alive = exchange_->report().alive;
    const auto lives = [&](int rank) { return std::ranges::binary_search(alive, rank); };
    for (const int rank : masked_) {
      if (lives(rank)) {
        problem_ = fmt::format("rank {} was masked before a call and is alive after it", rank);
      }
    }
    masked_.clear();
    for (int rank = 0; rank < storm_.setup.num_ranks; ++rank) {
      const Fate& fate = storm_.fates[static_cast<size_t>(rank)];
      // If the one who should mask it is lost, the last one does.
      const bool is_time = step_ >= fate.step && (rank_ == fate.masker || step_ >= fate.step + 20);
      if (fate.end == End::kMasked && rank != rank_ && lives(rank) && is_time &&
          (rank_ == fate.masker || rank_ == storm_.last)) {
        masked_.push_back(rank);
      }
      if (fate.end == End::kStopped && rank_ == storm_.last && !lives(rank)) {
        ::kill(board_.pid[static_cast<size_t>(rank)], SIGCONT);
      }
    }
    if (!masked_.empty()) {
      exchange_->mask(masked_);
    }
    if (fate_.end == End::kLeft && step_ >= fate_.step) {
      throw Leaves();
    }
    meet(fate_.when == When::kStep && step_ == fate_.step);
    ++step_;
  }

  const Storm& storm_;
  int rank_;
  const Fate& fate_;
  Board& board_;
  Watch watch_;
  std::optional<Exchange> exchange_;
  int step_ = 0;
  std::atomic<bool> has_stopped_ = false;
  std::vector<int> masked_;
  std::string problem_;
};

StormCount count(const Storm& storm, const std::vector<int>& statuses) {
  StormCount count;
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    const End end = storm.fates[rank].end;
    const int status = statuses[rank];
    if (status == 128 + SIGALRM || status == 128 + SIGTERM) {
      ++count.hung;
    } else if (status != (end == End::kKilled ? 128 + SIGKILL : 0)) {
      ++count.wrong;
    } else {
      count.killed += end == End::kKilled ? 1 : 0;
      count.stopped += end == End::kStopped ? 1 : 0;
      count.left += end == End::kLeft ? 1 : 0;
      count.masked += end == End::kMasked ? 1 : 0;
    }
  }
  if (count.wrong + count.hung > 0) {
    fmt::print(stderr, "storm {}: statuses {}\n", storm.seed, fmt::join(statuses, " "));
  }
  return count;
}

}  // namespace

StormCount& StormCount::operator+=(const StormCount& other) {
  killed += other.killed;
  stopped += other.stopped;
  left += other.left;
  masked += other.masked;
  wrong += other.wrong;
  hung += other.hung;
  return *this;
}

StormCount run_storm(uint64_t seed, const StormLimits& limits) {
  const Storm storm = make_storm(seed, limits);
  const Shared<Board> board;
  const auto body = [&](const Group& group) {
    StormRank rank(storm, group, *board);
    const std::string problem = rank.run();
    if (!problem.empty()) {
      fmt::print(stderr, "storm {}, rank {}: {}\n", seed, group.rank(), problem);
    }
    if (group.rank() == storm.last) {
      for (const auto& pid : board->pid) {
        if (pid != 0 && pid != ::getpid()) {
          ::kill(pid, SIGCONT);
        }
      }
    }
    return problem.empty() ? 0 : 1;
  };
  // Their own alarm ends those that hang.
  return count(storm, run_forked(storm.setup.num_ranks, body, {.notice = 2 * storm.bound}));
}

}  // namespace weft::test
