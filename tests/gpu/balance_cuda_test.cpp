// SPDX-License-Identifier: Apache-2.0
// Balancing on a GPU gives what it gives on a CPU, integer for integer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda/plan/balance/launch.hpp"
#include "gpu/device_bytes.hpp"
#include "gpu/gpu_test.hpp"
#include "plan/balance/balance.hpp"
#include "plan/random_routing.hpp"
#include "plan/without.hpp"
#include "unit/plan/balance_cases.hpp"
#include "weft/error.hpp"

namespace weft::test {
namespace {

using Numbers = std::vector<int32_t>;

int32_t* numbers_of(const DeviceBytes& bytes) {
  return reinterpret_cast<int32_t*>(bytes.get());
}

DeviceBytes on_device(const Numbers& numbers) {
  return device_copy(numbers.data(), numbers.size() * sizeof(int32_t));
}

Numbers from_device(const DeviceBytes& bytes, size_t size) {
  Numbers numbers(size);
  const size_t num_bytes = size * sizeof(int32_t);
  WEFT_CUDA(Context{}, cudaMemcpy(numbers.data(), bytes.get(), num_bytes, cudaMemcpyDeviceToHost));
  return numbers;
}

// Memory that a kernel has to fill itself: no zeroes.
DeviceBytes to_fill(size_t size) {
  return on_device(Numbers(size, 0x5a5a5a5a));
}

struct Counted {
  int num_ranks = 0;
  int num_experts = 0;
  int topk = 0;
  std::vector<Numbers> routes;  // by rank [tokens, topk]
  Numbers counts;               // [num_ranks, num_experts]
  BalanceOptions options;
  Numbers placement;  // [num_ranks, options.replicas] where replicas lie; empty: they are planned

  [[nodiscard]] PhysicalExperts shape() const { return {num_ranks, num_experts, options.replicas}; }

  [[nodiscard]] Numbers counts_of(int rank) const {
    const auto begin = counts.begin() + rank * num_experts;
    return {begin, begin + num_experts};
  }
  void add(Numbers experts) {
    counts.resize(counts.size() + static_cast<size_t>(num_experts), 0);
    for (const int32_t expert : experts) {
      if (expert >= 0) {
        ++counts[counts.size() - static_cast<size_t>(num_experts - expert)];
      }
    }
    routes.push_back(std::move(experts));
  }
};

// Replicas of other ranks' experts, each of them once on a rank.
void place_anywhere(Counted& c, RandomSource& random) {
  const PhysicalExperts shape = c.shape();
  for (int rank = 0; rank < c.num_ranks; ++rank) {
    const auto first = static_cast<std::ptrdiff_t>(c.placement.size());
    for (int i = 0; i < c.options.replicas; ++i) {
      const auto expert =
          static_cast<int32_t>(random.below(static_cast<uint64_t>(c.num_experts) + 1)) - 1;
      const bool is_there =
          std::find(c.placement.begin() + first, c.placement.end(), expert) != c.placement.end();
      const bool is_free = expert >= 0 && shape.owner_of(expert) != rank && !is_there;
      c.placement.push_back(is_free ? expert : -1);
    }
  }
}

// Some ranks, but not all, have no tokens and no experts any more.
void lose_any(Counted& c, RandomSource& random) {
  const auto spared = static_cast<int>(random.below(static_cast<uint64_t>(c.num_ranks)));
  for (int rank = 0; rank < c.num_ranks; ++rank) {
    if (rank != spared && random.below(3) == 0) {
      c.options.lost.push_back(rank);
    }
  }
}

Counted random_counted(uint64_t seed) {
  RandomSource random(seed);
  const auto pick = [&](std::initializer_list<int> values) {
    return *(values.begin() + random.below(values.size()));
  };
  Counted c;
  c.num_ranks = pick({1, 2, 3, 7, 8, 16, 31, 32, 33, 40, 64});
  c.num_experts = c.num_ranks * pick({1, 2, 4, 5, 32, 40});
  c.options.replicas = pick({0, 1, 1, 2, 2, 3, 4, 16});
  c.options.min_rows = pick({1, 1, 2, 10, 100});
  c.options.block_rows = pick({1, 1, 1, 2, 7, 128});
  c.options.replica_rows = pick({0, 0, 1, 30, 500});
  const int domains = pick({0, 0, 2, 3});  // neighbours, or every second or third rank
  const bool is_strided = random.below(2) == 1;
  for (int rank = 0; domains > 0 && rank < c.num_ranks; ++rank) {
    c.options.domain_of.push_back(is_strided ? rank % domains : rank / domains);
  }
  RandomRouting spec;
  spec.num_experts = c.num_experts;
  c.topk = std::min(c.num_experts, pick({1, 2, 5, 8}));
  spec.topk = c.topk;
  constexpr Popularity kKinds[] = {Popularity::kUniform, Popularity::kZipf, Popularity::kOneExpert};
  spec.popularity = kKinds[random.below(3)];
  spec.repeat_experts = true;
  spec.zipf_exponent = 0.5 * pick({1, 2, 4});
  spec.hole_fraction = 0.25 * pick({0, 0, 1, 4});
  spec.seed = random.next();
  const bool is_small = c.num_ranks <= kMaxDomainRanks;
  if (is_small && random.below(2) == 0) {
    lose_any(c, random);
  }
  for (int rank = 0; rank < c.num_ranks; ++rank) {
    spec.num_tokens = is_among(c.options.lost, rank) ? 0 : pick({0, 1, 30, 200, 1000});
    c.add(random_routing(spec, rank).expert);
  }
  if (c.options.replicas > 0 && is_small && random.below(3) == 0) {
    place_anywhere(c, random);
  }
  return c;
}

// Returns `c` without routes to experts that only lost ranks have.
Counted without_lost(const Counted& c) {
  Counted rest = c;
  rest.routes.clear();
  rest.counts.clear();
  const auto lost = experts_without_copy(c.shape(), c.placement, c.options.lost);
  for (const Numbers& routes : c.routes) {
    RouteTable table;
    table.expert = routes;
    drop_routes_to(lost, table);
    rest.add(std::move(table.expert));
  }
  return rest;
}

struct DeviceBalance {
  PhysicalExperts shape;
  DeviceBytes replicas, rows, quotas, first, next, lost;

  [[nodiscard]] PlaceLists places() const { return {numbers_of(first), numbers_of(next)}; }
};

DeviceBalance plan_on_device(const Counted& c) {
  DeviceBalance out;
  out.shape = c.shape();
  const auto count = static_cast<size_t>(out.shape.count());
  out.replicas = to_fill(static_cast<size_t>(c.num_ranks * c.options.replicas));
  out.rows = to_fill(count);
  out.quotas = to_fill(count * static_cast<size_t>(c.num_ranks));
  out.first = to_fill(static_cast<size_t>(c.num_experts));
  out.next = to_fill(count);
  Numbers lost(1, 0);
  for (const int rank : c.options.lost) {
    lost[0] |= static_cast<int32_t>(1U << static_cast<uint32_t>(rank));
  }
  out.lost = on_device(lost);
  const DeviceBytes counts = on_device(c.counts);
  const DeviceBytes domain_of = on_device(c.options.domain_of);
  BalanceLaunch call;
  call.shape = out.shape;
  call.min_rows = static_cast<int32_t>(c.options.min_rows);
  call.block_rows = static_cast<int32_t>(c.options.block_rows);
  call.replica_rows = c.options.replica_rows;
  call.counts = numbers_of(counts);
  call.domain_of = c.options.domain_of.empty() ? nullptr : numbers_of(domain_of);
  call.lost = reinterpret_cast<const uint32_t*>(out.lost.get());
  call.replicas = numbers_of(out.replicas);
  call.rows = numbers_of(out.rows);
  call.quotas = numbers_of(out.quotas);
  call.places = out.places();
  prepare_balance();
  check_balance(out.shape);
  launch_plan_balance(call, c.placement, nullptr);
  WEFT_CUDA(Context{}, cudaDeviceSynchronize());
  return out;
}

struct Assigned {
  Numbers counts;
  Numbers physical;
};

template <class Index>
Assigned assign_on_device(
    const Counted& c, const DeviceBalance& balance, int source, const std::vector<Index>& topk_idx
) {
  const auto num_experts = static_cast<size_t>(c.num_experts);
  const auto topk = static_cast<size_t>(c.topk);
  const size_t stride = topk + (sizeof(Index) == sizeof(int32_t) ? 3 : 0);
  std::vector<Index> spread(topk_idx.size() / topk * stride);  // zeroes where nobody may look
  for (size_t i = 0; i < topk_idx.size(); ++i) {
    spread[i / topk * stride + i % topk] = topk_idx[i];
  }
  const DeviceBytes given = device_copy(spread.data(), spread.size() * sizeof(Index));
  const DeviceBytes block_counts = to_fill(kAssignBlocks * num_experts);
  const DeviceBytes counts = to_fill(num_experts);
  const DeviceBytes physical = to_fill(topk_idx.size() + 1);
  AssignLaunch call;
  call.shape = balance.shape;
  call.topk_idx = given.get();
  call.index_bytes = sizeof(Index);
  call.stride = static_cast<int32_t>(stride);
  call.topk = c.topk;
  call.num_tokens = static_cast<int64_t>(topk_idx.size()) / c.topk;
  call.source = source;
  call.lost = reinterpret_cast<const uint32_t*>(balance.lost.get());
  call.block_counts = numbers_of(block_counts);
  call.counts = numbers_of(counts);
  call.quotas = numbers_of(balance.quotas);
  call.places = balance.places();
  call.physical = numbers_of(physical);
  launch_count_routes(call, nullptr);
  launch_assign_routes(call, nullptr);
  WEFT_CUDA(Context{}, cudaDeviceSynchronize());
  Assigned out = {from_device(counts, num_experts), from_device(physical, topk_idx.size() + 1)};
  EXPECT_EQ(out.physical.back(), 0x5a5a5a5a);  // nothing beyond the routes
  out.physical.pop_back();
  return out;
}

Balance balance_on_cpu(const Counted& c) {
  if (c.placement.empty()) {
    return plan_balance(c.counts, c.num_ranks, c.options);
  }
  const auto num_experts = static_cast<size_t>(c.num_experts);
  std::vector<int64_t> rows(num_experts, 0);
  for (size_t i = 0; i < c.counts.size(); ++i) {
    rows[i % num_experts] += c.counts[i];
  }
  Placement spread =
      spread_rows(rows, c.shape(), c.placement, c.options.block_rows, c.options.lost);
  return share_out(c.counts, std::move(spread), c.options.domain_of);
}

void expect_equal(const DeviceBalance& got, const Balance& want) {
  const std::vector<int64_t>& rows = want.placement.rows;
  EXPECT_EQ(from_device(got.replicas, want.replicas().size()), want.replicas());
  EXPECT_EQ(from_device(got.rows, rows.size()), Numbers(rows.begin(), rows.end()));
  EXPECT_EQ(
      from_device(got.quotas, want.quotas.size()), Numbers(want.quotas.begin(), want.quotas.end())
  );
}

// Places, quotas, counts, and the routes of the first, the last and another rank. What a CPU leaves
// out before it counts, a GPU with a placement leaves out when it assigns.
void expect_as_on_cpu(const Counted& all) {
  const Counted rest = without_lost(all);
  const Counted& c = all.placement.empty() ? rest : all;
  const Balance want = balance_on_cpu(rest);
  const DeviceBalance got = plan_on_device(c);
  expect_equal(got, want);
  for (const int source : {0, c.num_ranks / 2, c.num_ranks - 1}) {
    const Numbers& routes = c.routes[static_cast<size_t>(source)];
    const Numbers physical = assign_routes(want, source, rest.routes[static_cast<size_t>(source)]);
    const Assigned narrow = assign_on_device(c, got, source, routes);
    EXPECT_EQ(narrow.counts, c.counts_of(source));
    EXPECT_EQ(narrow.physical, physical);
    const std::vector<int64_t> wide(routes.begin(), routes.end());
    EXPECT_EQ(assign_on_device(c, got, source, wide).physical, physical);
  }
}

class BalanceCudaTest : public GpuTest {};

TEST_F(BalanceCudaTest, IsAsOnCpuForRandomRouting) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    expect_as_on_cpu(random_counted(seed));
  }
}

// All tokens of one rank, or of all, to one expert; nobody has any; the most replicas.
TEST_F(BalanceCudaTest, IsAsOnCpuForUglyRouting) {
  for (const int num_ranks : {1, 8, 32, 64}) {
    for (const int replicas : {0, 1, 2, 16}) {
      for (const int kind : {0, 1, 2}) {
        SCOPED_TRACE(testing::Message() << num_ranks << " ranks, " << replicas << ", " << kind);
        Counted c;
        c.num_ranks = num_ranks;
        c.num_experts = 256;
        c.topk = 4;
        c.options.replicas = replicas;
        for (int rank = 0; rank < num_ranks; ++rank) {
          const bool has_any = kind == 1 || (kind == 2 && rank == num_ranks - 1);
          c.add(Numbers(has_any ? 4096 : 0, 255));
        }
        expect_as_on_cpu(c);
      }
    }
  }
}

// Counts alone, as many rows as there may be: the last limits are near 2^31.
TEST_F(BalanceCudaTest, IsAsOnCpuForManyRows) {
  Counted c;
  c.num_ranks = 8;
  c.num_experts = 16;
  c.options.replicas = 2;
  c.counts.assign(128, 0);
  c.counts[17] = 0x7fffffff - 1000;
  c.counts[99] = 1000;
  expect_equal(plan_on_device(c), plan_balance(c.counts, c.num_ranks, c.options));
}

// One rank or two in a lane; whole blocks; and places that would get too few rows.
TEST_F(BalanceCudaTest, PoursRowsOnceMoreAsOnCpu) {
  for (const int num_ranks : {7, 40}) {
    for (const BalanceOptions& options :
         {BalanceOptions{.replicas = 1, .min_rows = 100},
          BalanceOptions{.replicas = 1, .min_rows = 100, .block_rows = 2},
          BalanceOptions{.replicas = 1, .min_rows = 290}}) {
      Counted c;
      c.num_ranks = num_ranks;
      c.num_experts = 3 * num_ranks;
      c.options = options;
      c.counts = rows_to_pour<int32_t>(num_ranks);
      c.counts.resize(static_cast<size_t>(num_ranks * c.num_experts), 0);
      expect_equal(plan_on_device(c), plan_balance(c.counts, num_ranks, options));
    }
  }
}

TEST_F(BalanceCudaTest, GivesRoutesThatAreNoneNoPlace) {
  Counted c;
  c.num_ranks = 2;
  c.num_experts = 4;
  c.topk = 2;
  c.options.replicas = 1;
  c.add({0, 1, 0, 1});
  c.add({0, -1});
  const DeviceBalance balance = plan_on_device(c);
  const int none = balance.shape.count();
  const Assigned got =
      assign_on_device<int64_t>(c, balance, 1, {-2, 4, -1, 0, int64_t{1} << 32, 0});
  EXPECT_EQ(got.counts, (Numbers{2, 0, 0, 0}));
  EXPECT_EQ(got.physical[0], none);
  EXPECT_EQ(got.physical[1], none);
  EXPECT_EQ(got.physical[2], -1);
  EXPECT_LT(got.physical[3], none);
  EXPECT_EQ(got.physical[4], none);
  EXPECT_EQ(got.physical[5], none);  // only one route to expert 0 was counted
}

TEST_F(BalanceCudaTest, RefusesMoreRanksThanItPlansFor) {
  try {
    check_balance({65, 65, 1});
    FAIL() << "65 ranks were taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(
        std::string(error.what()).find("65 ranks (a GPU plans at most 64)"), std::string::npos
    );
  }
}

}  // namespace
}  // namespace weft::test
