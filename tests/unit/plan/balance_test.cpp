// SPDX-License-Identifier: Apache-2.0
// Balancing against the oracle and, for small sizes, against all placements there are.
#include "plan/balance/balance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "balance_oracle.hpp"
#include "plan/balance/routing.hpp"
#include "plan/random_routing.hpp"
#include "unit/plan/balance_cases.hpp"
#include "unit/plan/plan_cases.hpp"

namespace weft {
namespace {

class RandomBalanceTest : public ::testing::TestWithParam<int> {
 protected:
  // Twenty cases a test.
  template <class Check>
  void for_all(Check check) {
    for (uint64_t i = 0; i < 20; ++i) {
      const uint64_t seed = static_cast<uint64_t>(GetParam()) * 20 + i;
      SCOPED_TRACE(seed);
      check(random_balance_case(seed));
    }
  }
};

int64_t sum(std::span<const int64_t> values) {
  return std::reduce(values.begin(), values.end());
}

TEST_P(RandomBalanceTest, MastersStayAndReplicasAreWorthTheirWeights) {
  for_all([](const BalanceCase& c) {
    const Balance balance = c.plan();
    const Placement& placement = balance.placement;
    for (int expert = 0; expert < c.num_experts; ++expert) {
      const int rank = expert / (c.num_experts / c.num_ranks);
      EXPECT_EQ(placement.shape.rank_of(placement.shape.master_of(expert)), rank);
      EXPECT_EQ(placement.expert[static_cast<size_t>(placement.shape.master_of(expert))], expert);
    }
    const std::vector<int32_t> replicas = balance.replicas();
    ASSERT_EQ(replicas.size(), static_cast<size_t>(c.num_ranks * c.options.replicas));
    for (int rank = 0; rank < c.num_ranks; ++rank) {
      std::set<int32_t> seen;
      for (int replica = 0; replica < c.options.replicas; ++replica) {
        const int32_t expert = replicas[static_cast<size_t>(rank * c.options.replicas + replica)];
        const auto place = static_cast<size_t>(placement.shape.place_of(rank, replica));
        EXPECT_EQ(placement.expert[place], expert);
        if (expert < 0) {
          EXPECT_EQ(placement.rows[place], 0);
          continue;
        }
        EXPECT_GE(placement.rows[place], c.options.min_rows);
        EXPECT_NE(placement.shape.owner_of(expert), rank);
        EXPECT_TRUE(seen.insert(expert).second) << "expert " << expert << " twice on " << rank;
      }
    }
  });
}

TEST_P(RandomBalanceTest, QuotasAddUp) {
  for_all([](const BalanceCase& c) {
    const Balance balance = c.plan();
    const Placement& placement = balance.placement;
    std::vector<int64_t> of_place(placement.rows.size(), 0);
    for (int source = 0; source < c.num_ranks; ++source) {
      std::vector<int64_t> of_expert(static_cast<size_t>(c.num_experts), 0);
      const auto quotas = balance.quotas_of(source);
      for (size_t i = 0; i < quotas.size(); ++i) {
        ASSERT_GE(quotas[i], 0);
        of_place[i] += quotas[i];
        if (placement.expert[i] >= 0) {
          of_expert[static_cast<size_t>(placement.expert[i])] += quotas[i];
        }
      }
      for (int expert = 0; expert < c.num_experts; ++expert) {
        EXPECT_EQ(of_expert[static_cast<size_t>(expert)], c.count(source, expert));
      }
    }
    EXPECT_EQ(of_place, placement.rows);
  });
}

TEST_P(RandomBalanceTest, AssignsEveryRouteOnceInTokenOrder) {
  for_all([](const BalanceCase& c) {
    const Balance balance = c.plan();
    const Placement& placement = balance.placement;
    for (int source = 0; source < c.num_ranks; ++source) {
      const std::vector<int32_t>& experts = c.routes[static_cast<size_t>(source)].expert;
      const std::vector<int32_t> assigned = assign_routes(balance, source, experts);
      ASSERT_EQ(assigned.size(), experts.size());
      std::vector<int64_t> used(placement.rows.size(), 0);
      std::vector<int32_t> last(static_cast<size_t>(c.num_experts), -1);
      for (size_t i = 0; i < experts.size(); ++i) {
        if (experts[i] < 0) {
          EXPECT_EQ(assigned[i], -1);
          continue;
        }
        ASSERT_EQ(placement.expert[static_cast<size_t>(assigned[i])], experts[i]);
        ++used[static_cast<size_t>(assigned[i])];
        // Places ascend with the tokens.
        EXPECT_GE(assigned[i], last[static_cast<size_t>(experts[i])]);
        last[static_cast<size_t>(experts[i])] = assigned[i];
      }
      EXPECT_TRUE(std::ranges::equal(used, balance.quotas_of(source)));
    }
  });
}

TEST_P(RandomBalanceTest, NeverGetsWorseWithMoreReplicas) {
  for_all([](const BalanceCase& c) {
    int64_t before = c.plan_with(0).placement.busiest();
    for (int replicas = 1; replicas <= 6; ++replicas) {
      const int64_t busiest = c.plan_with(replicas).placement.busiest();
      EXPECT_LE(busiest, before) << replicas << " replicas";
      before = busiest;
    }
  });
}

// Either all replicas or none: those that spare the busiest rank more rows than they cost.
TEST_P(RandomBalanceTest, HasNoReplicasThatCostMoreThanTheySpare) {
  for_all([](const BalanceCase& c) {
    const Placement free = c.plan().placement;
    const Placement none = c.plan_with(0).placement;
    std::vector<int64_t> moved(static_cast<size_t>(c.num_ranks), 0);  // by rank that gives
    std::vector<int64_t> taken = moved;
    const std::vector<int32_t> replicas = c.plan().replicas();
    for (size_t i = 0; i < replicas.size(); ++i) {
      if (replicas[i] >= 0) {
        ++moved[static_cast<size_t>(free.shape.owner_of(replicas[i]))];
        ++taken[i / static_cast<size_t>(c.options.replicas)];
      }
    }
    const int64_t most = std::max(std::ranges::max(moved), std::ranges::max(taken));
    for (const int64_t cost : {1, 3, 10, 1000}) {
      BalanceCase dear = c;
      dear.options.replica_rows = cost;
      const Placement found = dear.plan().placement;
      const bool is_worth = none.busiest() - free.busiest() > most * cost;
      EXPECT_EQ(found.busiest(), is_worth ? free.busiest() : none.busiest());
      if (is_worth) {
        EXPECT_EQ(found.expert, free.expert);
        EXPECT_EQ(found.rows, free.rows);
      } else {
        const auto places = std::ranges::count_if(found.expert, [](int e) { return e >= 0; });
        EXPECT_EQ(places, c.num_experts);
      }
    }
  });
}

TEST_P(RandomBalanceTest, IsWithinOnePercentOfTheOracle) {
  for_all([](BalanceCase c) {
    c.options.min_rows = 1;  // the oracle knows no least number
    const Placement placement = c.plan().placement;
    const int64_t least = least_busiest(placement);
    EXPECT_GE(least * c.num_ranks, sum(placement.rows));
    EXPECT_GE(placement.busiest(), least);
    EXPECT_LE(placement.busiest(), least + std::max<int64_t>(1, least / 100));
  });
}

// Replicas that somebody else has placed: no rank could have much less to do.
TEST_P(RandomBalanceTest, FixedReplicasAreFilledAsEvenlyAsTheOracleDoes) {
  for_all([](const BalanceCase& c) {
    RandomSource random(c.counts.size() + static_cast<uint64_t>(sum(c.plan().placement.rows)));
    const PhysicalExperts shape = {c.num_ranks, c.num_experts, 2};
    std::vector<int32_t> replicas;
    for (int rank = 0; rank < c.num_ranks; ++rank) {
      const auto first = static_cast<int>(random.below(static_cast<uint64_t>(c.num_experts)));
      for (const int expert : {first, (first + 1) % c.num_experts}) {
        const bool is_new =
            shape.owner_of(expert) != rank && (expert != first || c.num_experts > 1);
        replicas.push_back(is_new ? expert : -1);
      }
    }
    check_balancing({.replicas = 2, .placement = replicas}, c.num_ranks, c.num_experts, {});
    std::vector<int64_t> rows(static_cast<size_t>(c.num_experts), 0);
    for (size_t i = 0; i < c.counts.size(); ++i) {
      rows[i % rows.size()] += c.counts[i];
    }
    const Placement placement = spread_rows(rows, shape, replicas);
    EXPECT_EQ(sum(placement.rows), sum(rows));
    EXPECT_GE(std::ranges::min(placement.rows), 0);
    const int64_t least = least_busiest(placement);
    EXPECT_GE(placement.busiest(), least);
    EXPECT_LE(placement.busiest(), least + std::max<int64_t>(1, least / 100));

    const Placement in_blocks = spread_rows(rows, shape, replicas, 4);
    EXPECT_EQ(sum(in_blocks.rows), sum(rows));
    for (size_t i = 0; i < replicas.size(); ++i) {
      const int place = shape.place_of(static_cast<int>(i) / 2, static_cast<int>(i) % 2);
      const int64_t whole = placement.rows[static_cast<size_t>(place)] / 4 * 4;
      EXPECT_EQ(in_blocks.rows[static_cast<size_t>(place)], whole);
    }

    const Balance balance = share_out(c.counts, placement, c.options.domain_of);
    EXPECT_EQ(balance.replicas(), replicas);
    for (int source = 0; source < c.num_ranks; ++source) {
      const auto& experts = c.routes[static_cast<size_t>(source)].expert;
      EXPECT_EQ(assign_routes(balance, source, experts).size(), experts.size());
    }
  });
}

// No place takes rows of an expert from other ranks or domains while rows of its own go elsewhere:
// they could have been exchanged.
TEST_P(RandomBalanceTest, SourcesAreServedAtHomeFirst) {
  for_all([](const BalanceCase& c) {
    const Balance balance = c.plan();
    const Placement& placement = balance.placement;
    std::vector<int> own(static_cast<size_t>(c.num_ranks));
    std::iota(own.begin(), own.end(), 0);
    const auto check = [&](const std::vector<int>& group_of) {
      for (size_t place = 0; place < placement.rows.size(); ++place) {
        const int32_t expert = placement.expert[place];
        const auto rank = static_cast<size_t>(placement.shape.rank_of(static_cast<int>(place)));
        int64_t strangers = 0;  // rows here from other groups
        int64_t away = 0;       // of the group's rows, those that another group's places got
        for (int source = 0; source < c.num_ranks; ++source) {
          const auto quotas = balance.quotas_of(source);
          const bool is_home = group_of[static_cast<size_t>(source)] == group_of[rank];
          strangers += is_home ? 0 : quotas[place];
          for (size_t other = 0; is_home && other < placement.rows.size(); ++other) {
            const auto at = static_cast<size_t>(placement.shape.rank_of(static_cast<int>(other)));
            const bool is_other =
                placement.expert[other] == expert && group_of[at] != group_of[rank];
            away += is_other ? quotas[other] : 0;
          }
        }
        EXPECT_TRUE(expert < 0 || strangers == 0 || away == 0) << "place " << place;
      }
    };
    check(own);
    if (!c.options.domain_of.empty()) {
      check(c.options.domain_of);
    }
  });
}

TEST_P(RandomBalanceTest, IsTheSameOnEachRank) {
  for_all([](const BalanceCase& c) {
    const Balance first = c.plan();
    // Another rank has other memory, and has planned something else before.
    const Balance unrelated = random_balance_case(99).plan();
    EXPECT_FALSE(unrelated.quotas.empty());
    const BalanceCase copy = c;
    const Balance second = copy.plan();
    EXPECT_EQ(first.placement.expert, second.placement.expert);
    EXPECT_EQ(first.placement.rows, second.placement.rows);
    EXPECT_EQ(first.quotas, second.quotas);
  });
}

// The instances of an expert, laid end to end, have its routes by source, then token; all but the
// master's in whole blocks.
TEST_P(RandomBalanceTest, ReplicasTakeWholeBlocksOfAnExpertsOrder) {
  for_all([](BalanceCase c) {
    c.options.block_rows = GetParam() % 2 == 0 ? 2 : 16;
    c.options.min_rows = GetParam() % 3 == 0 ? 5 : 1;
    const Balance balance = c.plan();
    const PhysicalExperts& shape = balance.placement.shape;
    std::vector<std::vector<int32_t>> order(static_cast<size_t>(c.num_experts));  // of its places
    for (int source = 0; source < c.num_ranks; ++source) {
      const std::vector<int32_t>& experts = c.routes[static_cast<size_t>(source)].expert;
      const std::vector<int32_t> assigned = assign_routes(balance, source, experts);
      for (size_t route = 0; route < experts.size(); ++route) {
        if (experts[route] >= 0) {
          order[static_cast<size_t>(experts[route])].push_back(assigned[route]);
        }
      }
    }
    for (int expert = 0; expert < c.num_experts; ++expert) {
      std::vector<int32_t> wanted;
      const auto append = [&](int place) {
        const int64_t rows = balance.placement.rows[static_cast<size_t>(place)];
        wanted.insert(wanted.end(), static_cast<size_t>(rows), place);
        return rows;
      };
      for (int place = 0; place < shape.count(); ++place) {
        if (balance.placement.expert[static_cast<size_t>(place)] == expert &&
            place != shape.master_of(expert)) {
          const int64_t rows = append(place);
          EXPECT_EQ(rows % c.options.block_rows, 0);
          EXPECT_GE(rows, std::max(c.options.min_rows, c.options.block_rows));
        }
      }
      append(shape.master_of(expert));
      EXPECT_EQ(order[static_cast<size_t>(expert)], wanted) << "expert " << expert;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomBalanceTest, ::testing::Range(0, 10));

// Known values: the same on every platform, and what a kernel has to find.
TEST(BalanceTest, GivesKnownValues) {
  // Rank 0 has 60 + 12 rows, rank 1 has 10 + 2, rank 2 has 3 + 3; 30 would be even.
  const std::vector<int32_t> counts = {20, 4, 5, 2, 1, 3, 20, 4, 5, 0, 1, 0, 20, 4, 0, 0, 1, 0};
  const Balance balance = plan_balance(counts, 3, {.replicas = 2});
  EXPECT_EQ(balance.replicas(), (std::vector<int32_t>{-1, -1, 0, -1, 0, -1}));
  EXPECT_EQ(
      balance.placement.rows, (std::vector<int64_t>{18, 12, 0, 0, 10, 2, 18, 0, 3, 3, 24, 0})
  );
  // Each takes of expert 0 what its own rank has; what is left of rank 0's goes to rank 2.
  EXPECT_EQ(balance.quotas_of(0)[0], 18);
  EXPECT_EQ(balance.quotas_of(1)[6], 18);
  EXPECT_EQ(balance.quotas_of(2)[10], 20);
  EXPECT_EQ(balance.quotas_of(0)[10], 2);
  EXPECT_EQ(balance.quotas_of(1)[10], 2);
}

// The choice of rank, expert and limit is known where several would do as well.
TEST(BalanceTest, BreaksTiesKnownly) {
  const std::vector<int64_t> rows = {9, 9, 30, 1, 2, 2, 40, 40, 3, 3, 0, 0, 5, 7, 5, 7};
  const Placement placement = place_replicas(rows, 8, {.replicas = 2, .min_rows = 2});
  EXPECT_EQ(placement.busiest(), 21);
  EXPECT_EQ(placement.expert, (std::vector<int32_t>{0,  1,  2,  -1, 2,  3,  -1, -1, 4,  5,  7,
                                                    -1, 6,  7,  -1, -1, 8,  9,  7,  -1, 10, 11,
                                                    6,  -1, 12, 13, 2,  -1, 14, 15, 6,  -1}));
  EXPECT_EQ(placement.rows, (std::vector<int64_t>{9,  9,  3, 0, 18, 1, 0, 0,  2, 2, 17,
                                                  0,  10, 8, 0, 0,  3, 3, 15, 0, 0, 0,
                                                  21, 0,  5, 7, 9,  0, 5, 7,  9, 0}));
}

// A rank that gives more than it has too much takes rows of others: with one replica a rank, three
// emptier ranks could not relieve four.
TEST(BalanceTest, UsesThePlacesOfRanksThatGive) {
  const std::vector<int64_t> rows = {200, 110, 110, 110, 50, 50, 70};
  const Placement placement = place_replicas(rows, 7, {.replicas = 1});
  EXPECT_EQ(placement.busiest(), 100);
}

// The search finds these places with a limit of 605 rows, and can keep no lower one.
TEST(BalanceTest, PoursRowsOnceMoreOverThePlacesThatWereFound) {
  for (const int num_ranks : {7, 40}) {
    const std::vector<int64_t> rows = rows_to_pour<int64_t>(num_ranks);
    const BalanceOptions options = {.replicas = 1, .min_rows = 100};
    const Placement placement = place_replicas(rows, num_ranks, options);
    EXPECT_EQ(placement.busiest(), 589);
    EXPECT_EQ(least_busiest(placement), 589);
    // One replica would have 277 rows then.
    EXPECT_EQ(place_replicas(rows, num_ranks, {.replicas = 1, .min_rows = 290}).busiest(), 605);
  }
}

TEST(BalanceTest, PrefersTheDomainOfTheSource) {
  // Expert 0 has 10 rows of each rank, and lies on ranks 0 and 2, each with a rank of its domain.
  const std::vector<int32_t> counts = {10, 0, 0, 0, 10, 0, 0, 0, 10, 0, 0, 0, 10, 0, 0, 0};
  const std::vector<int32_t> expert = {0, -1, 1, -1, 2, 0, 3, -1};
  const std::vector<int64_t> rows = {20, 0, 0, 0, 0, 20, 0, 0};
  const std::vector<int> domain_of = {0, 1, 1, 0};
  const Balance balance = share_out(counts, {{4, 4, 1}, expert, rows}, domain_of);
  EXPECT_EQ(balance.quotas_of(1)[5], 10);
  EXPECT_EQ(balance.quotas_of(3)[0], 10);
}

// The best of all placements there are, by brute force.
int64_t best_of_all(const BalanceCase& c) {
  std::vector<int64_t> rows(static_cast<size_t>(c.num_experts), 0);
  for (size_t i = 0; i < c.counts.size(); ++i) {
    rows[i % rows.size()] += c.counts[i];
  }
  const PhysicalExperts shape = {c.num_ranks, c.num_experts, c.options.replicas};
  Placement all = {shape, {}, std::vector<int64_t>(static_cast<size_t>(shape.count()), 0)};
  all.expert.assign(all.rows.size(), -1);
  std::vector<size_t> places;
  for (int rank = 0; rank < c.num_ranks; ++rank) {
    for (int replica = 0; replica < c.options.replicas; ++replica) {
      places.push_back(static_cast<size_t>(shape.place_of(rank, replica)));
    }
  }
  for (int expert = 0; expert < c.num_experts; ++expert) {
    all.expert[static_cast<size_t>(shape.master_of(expert))] = expert;
    all.rows[static_cast<size_t>(shape.master_of(expert))] = rows[static_cast<size_t>(expert)];
  }
  int64_t best = std::numeric_limits<int64_t>::max();
  while (true) {
    best = std::min(best, least_busiest(all));
    size_t digit = 0;  // counts through all contents of the places
    while (digit < places.size() && ++all.expert[places[digit]] == c.num_experts) {
      all.expert[places[digit++]] = -1;
    }
    if (digit == places.size()) {
      return best;
    }
  }
}

// A greedy search is not the best of all, but it may not be far from it, and mostly is there.
TEST(BalanceTest, IsNearTheBestOfAllPlacements) {
  RandomSource random(5);
  int found = 0;
  const int num_cases = 60;
  for (int i = 0; i < num_cases; ++i) {
    BalanceCase c;
    c.num_ranks = 3;
    c.num_experts = pick_one(random, {3, 6});
    c.options.replicas = 1;
    for (int n = 0; n < c.num_ranks * c.num_experts; ++n) {
      c.counts.push_back(static_cast<int32_t>(random.below(pick_one<uint64_t>(random, {5, 50}))));
    }
    const int64_t busiest = c.plan().placement.busiest();
    const int64_t best = best_of_all(c);
    EXPECT_GE(busiest, best);
    EXPECT_LE(busiest * 10, best * 12) << "case " << i;
    found += busiest == best ? 1 : 0;
  }
  EXPECT_GE(found, num_cases * 3 / 4);
}

// The oracle says the same by its other definition: of all sets of experts, the most rows for each
// rank that has one of them.
TEST(BalanceOracleTest, IsTheLargestShareOfAnySetOfExperts) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    const BalanceCase c = random_balance_case(seed);
    if (c.num_experts > 9) {
      continue;
    }
    const Placement placement = c.plan().placement;
    int64_t most = 0;
    for (unsigned set = 1; set < 1U << c.num_experts; ++set) {
      int64_t rows = 0;
      std::set<int> ranks;
      for (size_t i = 0; i < placement.expert.size(); ++i) {
        if (placement.expert[i] >= 0 && (set >> placement.expert[i] & 1) != 0) {
          rows += placement.rows[i];
          ranks.insert(placement.shape.rank_of(static_cast<int>(i)));
        }
      }
      const auto num_ranks = static_cast<int64_t>(ranks.size());
      most = std::max(most, (rows + num_ranks - 1) / num_ranks);
    }
    EXPECT_EQ(least_busiest(placement), most);
  }
}

TEST(BalanceTest, KeepsLargeGroupsEven) {
  for (const int num_ranks : {8, 64}) {
    RandomRouting spec;
    spec.num_tokens = 512;
    spec.num_experts = 128;
    spec.topk = 8;
    spec.popularity = Popularity::kZipf;
    spec.zipf_exponent = 1.2;
    std::vector<int32_t> counts(static_cast<size_t>(num_ranks * spec.num_experts), 0);
    for (int rank = 0; rank < num_ranks; ++rank) {
      for (const int32_t expert : random_routing(spec, rank).expert) {
        ++counts[static_cast<size_t>(rank * spec.num_experts + expert)];
      }
    }
    const auto busiest = [&](int replicas) {
      return plan_balance(counts, num_ranks, {.replicas = replicas}).placement.busiest();
    };
    const int64_t mean = spec.num_tokens * spec.topk;
    EXPECT_GE(busiest(0) * 10, mean * 15);  // there is something to do
    EXPECT_LE(busiest(1) * 100, mean * 108);
    EXPECT_LE(busiest(2) * 100, mean * 102);
  }
}

std::string refusal(
    const std::vector<int32_t>& counts, int num_ranks, const BalanceOptions& options
) {
  return testing::message_of([&] { static_cast<void>(plan_balance(counts, num_ranks, options)); });
}

TEST(BalanceTest, RefusesWhatDoesNotFit) {
  const std::vector<int32_t> counts = {1, 2, 3, 4};
  EXPECT_EQ(refusal(counts, 2, {}), "nothing");
  EXPECT_EQ(refusal(counts, 0, {}), "plan_balance: num_ranks is 0 (at least 1)");
  EXPECT_EQ(
      refusal(counts, 3, {}),
      "plan_balance: the number of counts is 4 (3 ranks times experts that they can share)"
  );
  EXPECT_EQ(refusal({1, -2, 3, 4}, 2, {}), "plan_balance: a count is -2 (at least 0)");
  EXPECT_EQ(refusal(counts, 2, {.replicas = -1}), "plan_balance: replicas is -1 (0 to 16)");
  EXPECT_EQ(refusal(counts, 2, {.replicas = 17}), "plan_balance: replicas is 17 (0 to 16)");
  EXPECT_EQ(refusal(counts, 2, {.min_rows = 0}), "plan_balance: min_rows is 0 (at least 1)");
  EXPECT_EQ(refusal(counts, 2, {.block_rows = 0}), "plan_balance: block_rows is 0 (1 to 1024)");
  EXPECT_EQ(
      refusal(counts, 2, {.domain_of = {0}}),
      "plan_balance: the size of domain_of is 1 (0 or the number of ranks, 2)"
  );
}

TEST(BalanceTest, RefusesRoutesThatWereNotCounted) {
  const std::vector<int32_t> counts = {1, 0, 0, 1};
  const Balance balance = plan_balance(counts, 2, {.replicas = 1});
  const auto refusal_of = [&](std::vector<int32_t> experts) {
    return testing::message_of([&] { static_cast<void>(assign_routes(balance, 0, experts)); });
  };
  EXPECT_EQ(
      refusal_of({0, 0}), "assign_routes: rank 0 has more routes to expert 0 than were counted"
  );
  EXPECT_EQ(refusal_of({0, 2}), "assign_routes: rank 0 has a route to expert 2 (of 2)");
}

}  // namespace
}  // namespace weft
