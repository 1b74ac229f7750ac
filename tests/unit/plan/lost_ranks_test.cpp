// SPDX-License-Identifier: Apache-2.0
// Balancing without ranks that are lost: what a group gives that never had them, and where experts
// of lost ranks live on as replicas, the oracle of maximum flow.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "balance_oracle.hpp"
#include "plan/balance/routing.hpp"
#include "plan/random_routing.hpp"
#include "plan/without.hpp"
#include "unit/plan/plan_cases.hpp"

namespace weft {
namespace {

struct LostCase {
  PhysicalExperts shape;
  std::vector<int> lost;
  std::vector<int> left;
  std::vector<int32_t> replicas;  // [num_ranks, shape.replicas]
  std::vector<int64_t> rows;      // [num_experts]; none of those without a copy on ranks left
  int64_t min_rows = 1;
  int64_t block_rows = 1;

  [[nodiscard]] bool is_lost(int rank) const { return std::ranges::find(lost, rank) != lost.end(); }
};

enum class Copies : uint8_t { kOfAll, kOfLeft };

LostCase random_lost_case(uint64_t seed, Copies copies) {
  RandomSource random(seed);
  LostCase c;
  c.shape.num_ranks = static_cast<int>(random.between(2, 9));
  c.shape.num_experts = c.shape.num_ranks * static_cast<int>(random.between(1, 5));
  c.shape.replicas = static_cast<int>(random.between(1, 3));
  const auto spared = static_cast<int>(random.below(static_cast<uint64_t>(c.shape.num_ranks)));
  for (int rank = 0; rank < c.shape.num_ranks; ++rank) {
    (rank != spared && random.below(3) == 0 ? c.lost : c.left).push_back(rank);
  }
  for (int rank = 0; rank < c.shape.num_ranks; ++rank) {
    std::vector<int32_t> here;
    for (int replica = 0; replica < c.shape.replicas; ++replica) {
      const auto expert =
          static_cast<int32_t>(random.below(static_cast<uint64_t>(c.shape.num_experts)));
      const bool may_be = c.shape.owner_of(expert) != rank &&
                          std::ranges::find(here, expert) == here.end() &&
                          (copies == Copies::kOfAll || !c.is_lost(c.shape.owner_of(expert)));
      here.push_back(may_be ? expert : -1);
    }
    c.replicas.insert(c.replicas.end(), here.begin(), here.end());
  }
  const int64_t scale = random.below(2) == 0 ? 1 : 300;  // with many rows the search ends early
  for (int expert = 0; expert < c.shape.num_experts; ++expert) {
    const int64_t most = random.below(4) == 0 ? 1000 : 60;
    c.rows.push_back(random.between(0, most * scale));
  }
  for (const int32_t expert : experts_without_copy(c.shape, c.replicas, c.lost)) {
    c.rows[static_cast<size_t>(expert)] = 0;
  }
  c.min_rows = random.between(1, 20);
  c.block_rows = random.below(2) == 0 ? 1 : 8;
  return c;
}

// Returns the case of a group of the ranks that are left, in its numbers. `c` has no replicas of
// experts of lost ranks.
LostCase group_of_left(const LostCase& c) {
  LostCase group;
  const int num_local = c.shape.num_local();
  const auto num_left = static_cast<int>(c.left.size());
  group.shape = {num_left, num_left * num_local, c.shape.replicas};
  for (const int rank : c.left) {
    const auto first = c.rows.begin() + rank * num_local;
    group.rows.insert(group.rows.end(), first, first + num_local);
    for (int replica = 0; replica < c.shape.replicas; ++replica) {
      const int32_t expert = c.replicas[static_cast<size_t>(rank * c.shape.replicas + replica)];
      const auto owner = std::ranges::find(c.left, expert / num_local) - c.left.begin();
      group.replicas.push_back(
          expert < 0 ? -1 : static_cast<int32_t>(owner) * num_local + expert % num_local
      );
    }
  }
  return group;
}

// Expects the same placement as that of the smaller group, and nothing on lost ranks.
void expect_same(const LostCase& c, const Placement& placement, const Placement& of_group) {
  const int per_rank = c.shape.per_rank();
  const int num_local = c.shape.num_local();
  for (size_t i = 0; i < c.left.size(); ++i) {
    for (int local = 0; local < per_rank; ++local) {
      const auto here = static_cast<size_t>(c.left[i] * per_rank + local);
      const size_t there = i * static_cast<size_t>(per_rank) + static_cast<size_t>(local);
      const int32_t expert = of_group.expert[there];
      const int owner = expert < 0 ? 0 : c.left[static_cast<size_t>(expert / num_local)];
      const int wanted = expert < 0 ? -1 : owner * num_local + expert % num_local;
      EXPECT_EQ(placement.expert[here], wanted);
      EXPECT_EQ(placement.rows[here], of_group.rows[there]);
    }
  }
  for (const int rank : c.lost) {
    EXPECT_EQ(placement.rows_of_ranks()[static_cast<size_t>(rank)], 0);
  }
}

template <class Check>
void for_all(Copies copies, const Check& check) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    check(random_lost_case(seed, copies));
  }
}

TEST(LostRanksTest, ThePlannerGivesWhatItGivesToTheRanksLeft) {
  for_all(Copies::kOfLeft, [](const LostCase& c) {
    const BalanceOptions options = {
        .replicas = c.shape.replicas, .min_rows = c.min_rows, .block_rows = c.block_rows};
    BalanceOptions without = options;
    without.lost = c.lost;
    const LostCase group = group_of_left(c);
    const Placement placement = place_replicas(c.rows, c.shape.num_ranks, without);
    expect_same(c, placement, place_replicas(group.rows, group.shape.num_ranks, options));
    for (const int rank : c.lost) {
      for (int replica = 0; replica < c.shape.replicas; ++replica) {
        const auto place = static_cast<size_t>(c.shape.place_of(rank, replica));
        EXPECT_EQ(placement.expert[place], -1);
      }
    }
  });
}

TEST(LostRanksTest, RowsAreSharedOutAsAmongTheRanksLeft) {
  for_all(Copies::kOfLeft, [](const LostCase& c) {
    const LostCase group = group_of_left(c);
    expect_same(
        c,
        spread_rows(c.rows, c.shape, c.replicas, c.block_rows, c.lost),
        spread_rows(group.rows, group.shape, group.replicas, c.block_rows)
    );
  });
}

// The replicas of lost ranks' experts get all of their rows, and no rank could have much less.
TEST(LostRanksTest, ReplicasTakeOverAsEvenlyAsTheOracleDoes) {
  for_all(Copies::kOfAll, [](const LostCase& c) {
    Placement placement = spread_rows(c.rows, c.shape, c.replicas, 1, c.lost);
    std::vector<int64_t> rows(c.rows.size(), 0);
    for (int place = 0; place < c.shape.count(); ++place) {
      const auto p = static_cast<size_t>(place);
      EXPECT_GE(placement.rows[p], 0);
      if (c.is_lost(c.shape.rank_of(place))) {
        EXPECT_EQ(placement.rows[p], 0);
        placement.expert[p] = -1;  // nor does the oracle give it any
      } else if (placement.expert[p] >= 0) {
        rows[static_cast<size_t>(placement.expert[p])] += placement.rows[p];
      }
    }
    EXPECT_EQ(rows, c.rows);
    const int64_t least = least_busiest(placement);
    EXPECT_LE(placement.busiest(), least + std::max<int64_t>(1, least / 100));
  });
}

// All but one place of an expert: its master, or if that is lost the last replica that is left.
TEST(LostRanksTest, ReplicasThatTakeOverTakeWholeBlocks) {
  for_all(Copies::kOfAll, [](const LostCase& c) {
    const Placement even = spread_rows(c.rows, c.shape, c.replicas, 1, c.lost);
    const Placement placement = spread_rows(c.rows, c.shape, c.replicas, 8, c.lost);
    for (int expert = 0; expert < c.shape.num_experts; ++expert) {
      std::vector<size_t> places;
      for (int place = 0; place < c.shape.count(); ++place) {
        const auto p = static_cast<size_t>(place);
        if (placement.expert[p] == expert && place != c.shape.master_of(expert) &&
            !c.is_lost(c.shape.rank_of(place))) {
          places.push_back(p);
        }
      }
      if (c.is_lost(c.shape.owner_of(expert)) && !places.empty()) {
        places.pop_back();
      }
      for (const size_t place : places) {
        EXPECT_EQ(placement.rows[place], even.rows[place] / 8 * 8);
      }
    }
    EXPECT_EQ(
        std::reduce(placement.rows.begin(), placement.rows.end()),
        std::reduce(c.rows.begin(), c.rows.end())
    );
    EXPECT_TRUE(std::ranges::all_of(c.lost, [&](int rank) {
      return placement.rows_of_ranks()[static_cast<size_t>(rank)] == 0;
    }));
  });
}

TEST(LostRanksTest, ExpertsWithoutACopyHaveNoRoutes) {
  const PhysicalExperts shape = {3, 6, 1};
  const std::vector<int32_t> replicas = {2, 4, 0};
  const auto without = [&](const std::vector<int>& lost) {
    return experts_without_copy(shape, replicas, lost);
  };
  EXPECT_EQ(without({}), (std::vector<int32_t>{}));
  EXPECT_EQ(without({1}), (std::vector<int32_t>{3}));
  EXPECT_EQ(without({1, 2}), (std::vector<int32_t>{3, 4, 5}));
  EXPECT_EQ(experts_without_copy({3, 6, 0}, {}, std::vector<int>{0}), (std::vector<int32_t>{0, 1}));

  RouteTable routes = testing::table_of(2, {{3, 2}, {-1, 5}});
  drop_routes_to(without({1}), routes);
  EXPECT_EQ(routes.expert, (std::vector<int32_t>{-1, 2, -1, 5}));
}

}  // namespace
}  // namespace weft
