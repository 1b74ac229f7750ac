// SPDX-License-Identifier: Apache-2.0
#include "survivors/fates.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "plan/random_routing.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

constexpr int kMostReturns = 4;

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

// Numbered by their first rank.
std::vector<int> random_domains(int num_ranks, RandomSource& random) {
  std::vector<int> domain_of;
  int num_domains = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto domain = static_cast<int>(random.between(rank == 1 ? 1 : 0, num_domains));
    num_domains = std::max(num_domains, domain + 1);
    domain_of.push_back(domain);
  }
  return domain_of;
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

}  // namespace

Storm make_storm(uint64_t seed, const StormLimits& limits) {
  RandomSource random(seed);
  Storm storm;
  storm.seed = seed;
  ExchangeSetup& setup = storm.setup;
  setup.num_ranks = static_cast<int>(random.between(2, kMostRanks));
  setup.transport = "shm";
  setup.num_threads = static_cast<int>(random.between(1, 2));
  setup.fan_out = pick(random, std::array{FanOut::kSource, FanOut::kReceiver});
  if (limits.has_domains) {
    setup.transport = "ofi:tcp";
    setup.domain_of = random_domains(setup.num_ranks, random);
  }
  setup.hidden = 8 * random.between(1, 12);
  setup.max_tokens = random.between(1, 70);
  setup.num_experts = setup.num_ranks * static_cast<int>(random.between(1, 4));
  setup.max_topk = std::min(4, setup.num_experts);
  storm.spec = random_spec(setup, random);
  storm.last = static_cast<int>(random.below(static_cast<uint64_t>(setup.num_ranks)));
  const bool has_stops = random.uniform() < limits.stops && !limits.has_domains;
  const std::chrono::microseconds span = pick(random, std::array{5'000us, 50'000us, 400'000us});
  const bool has_returns = !has_stops && random.uniform() < limits.returns;
  storm.num_returns = has_returns ? static_cast<int>(random.between(1, kMostReturns)) : 0;
  for (int number = 0; number <= storm.num_returns; ++number) {
    std::vector<Fate> fates;
    for (int rank = 0; rank < setup.num_ranks; ++rank) {
      fates.push_back(random_fate(storm, span, random));
      if (has_stops && random.below(3) == 0) {
        fates.back().end = End::kStopped;
      }
      if (limits.has_domains && fates.back().end == End::kMasked) {
        fates.back().end = End::kKilled;
      }
    }
    fates[static_cast<size_t>(storm.last)].end = End::kNone;
    storm.fates.push_back(std::move(fates));
  }
  if (has_stops) {
    setup.timeout = limits.deadline;
    storm.bound += 3 * kMostRanks * std::chrono::ceil<std::chrono::seconds>(limits.deadline);
  }
  return storm;
}

bool calls_back(const Storm& storm, uint64_t round) {
  return RandomSource(storm.seed + (round << 32)).below(2) == 0;
}

}  // namespace weft::test
