// SPDX-License-Identifier: Apache-2.0
#include "group/topology.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <random>

#include "core/env.hpp"
#include "group/control_plane.hpp"
#include "group/shared_memory.hpp"
#include "group_test.hpp"

namespace weft {
namespace {

using Domains = std::vector<std::vector<int>>;

// Ranks of one letter reach each other.
Reach reach_of(const std::string& hosts) {
  Reach reach;
  for (const char a : hosts) {
    auto& row = reach.emplace_back();
    std::ranges::transform(hosts, std::back_inserter(row), [&](char b) {
      return static_cast<uint8_t>(a == b);
    });
  }
  return reach;
}

TEST(TopologyTest, RanksThatReachEachOtherFormADomain) {
  EXPECT_EQ(domains_of(reach_of("aaaa")), (Domains{{0, 1, 2, 3}}));
  EXPECT_EQ(domains_of(reach_of("abab")), (Domains{{0, 2}, {1, 3}}));
  EXPECT_EQ(domains_of(reach_of("abc")), (Domains{{0}, {1}, {2}}));
  EXPECT_EQ(domains_of(reach_of("a")), (Domains{{0}}));
}

TEST(TopologyTest, OneWayReachIsNotEnough) {
  Reach reach = reach_of("aaa");
  reach[2][0] = 0;
  EXPECT_EQ(domains_of(reach), (Domains{{0, 1}, {2}}));
}

TEST(TopologyTest, AnyReachGivesDomainsWhoseRanksAllReachEachOther) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int trial = 0; trial < 100; ++trial) {
    const size_t size = 1 + random() % 9;
    Reach reach(size, std::vector<uint8_t>(size));
    for (auto& row : reach) {
      std::ranges::generate(row, [&] { return static_cast<uint8_t>(random() % 4 != 0); });
    }
    std::vector<int> seen;
    for (const std::vector<int>& domain : domains_of(reach)) {
      EXPECT_TRUE(std::ranges::is_sorted(domain));
      for (const int a : domain) {
        seen.push_back(a);
        for (const int b : domain) {
          EXPECT_TRUE(a == b || reach[static_cast<size_t>(a)][static_cast<size_t>(b)] != 0);
        }
      }
    }
    std::ranges::sort(seen);
    for (size_t i = 0; i < size; ++i) {
      EXPECT_EQ(seen.at(i), static_cast<int>(i));
    }
    EXPECT_EQ(seen.size(), size);
  }
}

TEST(TopologyTest, SplitsDomainsIntoEqualRuns) {
  const Domains domains = {{0, 2, 4, 6}, {1, 3}};
  EXPECT_EQ(split_domains(domains, 1, {}), (Domains{{0}, {1}, {2}, {3}, {4}, {6}}));
  EXPECT_EQ(split_domains(domains, 2, {}), (Domains{{0, 2}, {1, 3}, {4, 6}}));
  EXPECT_EQ(split_domains(domains, 7, {}), domains);  // fewer ranks than one domain holds
}

TEST(TopologyTest, RefusesASplitThatDoesNotDivide) {
  expect_error(
      ErrorCode::kInvalidArgument,
      "topology: WEFT_RANKS_PER_DOMAIN = 4 does not divide a domain of 2 ranks (the one of rank 1) "
      "[rank 3/6]",
      [] {
        static_cast<void>(split_domains({{0, 2, 4, 5}, {1, 3}}, 4, {3, 6, {}}));
      }
  );
  expect_error(ErrorCode::kInvalidArgument, "topology: WEFT_RANKS_PER_DOMAIN = 0 is too small", [] {
    static_cast<void>(split_domains({{0}}, 0, {}));
  });
}

TEST(TopologyTest, ListsEachRanksDomainAndHost) {
  const Topology topology = make_topology({{0, 2}, {1}}, {"x", "y", "x"}, false);
  EXPECT_EQ(topology.domain_of, (std::vector<int>{0, 1, 0}));
  EXPECT_EQ(topology.domains, (Domains{{0, 2}, {1}}));
  EXPECT_EQ(topology.host_of, (std::vector<std::string>{"x", "y", "x"}));
}

// Offsets in a rank's card of its page and, behind that, of the random number in it (topology.cpp).
constexpr size_t kPageAt = sizeof(uint64_t);
constexpr size_t kInodeAt = kPageAt + offsetof(SharedMemoryRef, inode);
constexpr size_t kNumberAt = kPageAt + sizeof(SharedMemoryRef);

// Runs the probe on threads; `tamper` may change what a rank hands to the others.
std::vector<Topology> probe(
    int num_ranks,
    std::optional<int> ranks_per_domain,
    const std::function<void(int rank, Bytes&)>& tamper = [](int, Bytes&) {}
) {
  std::vector<Topology> topologies(static_cast<size_t>(num_ranks));
  run_threads(num_ranks, [&](Group& group) {
    const auto swap = [&](std::span<const std::byte> block) {
      Bytes bytes(block.begin(), block.end());
      tamper(group.rank(), bytes);
      return group.all_gather(bytes);
    };
    topologies[static_cast<size_t>(group.rank())] =
        probe_topology(swap, [&] { return ranks_per_domain; }, {group.rank(), num_ranks, {}});
  });
  return topologies;
}

TEST(ProbeTest, ThreadsOfOneProcessFormADomain) {
  for (const Topology& topology : probe(3, std::nullopt)) {
    EXPECT_EQ(topology.domains, (Domains{{0, 1, 2}}));
    EXPECT_TRUE(topology.one_process);
    EXPECT_EQ(topology.host_of, std::vector<std::string>(3, this_host()));
  }
}

TEST(ProbeTest, DomainsCanBeMadeSmaller) {
  for (const Topology& topology : probe(4, 2)) {
    EXPECT_EQ(topology.domains, (Domains{{0, 1}, {2, 3}}));
  }
}

TEST(ProbeTest, ARankWhosePageCannotBeMappedIsADomainOfItsOwn) {
  const auto topologies = probe(3, std::nullopt, [](int rank, Bytes& bytes) {
    if (rank == 1 && bytes.size() > 3) {
      std::fill_n(bytes.begin() + kInodeAt, sizeof(uint64_t), std::byte{0x5a});
    }
  });
  for (const Topology& topology : topologies) {
    EXPECT_EQ(topology.domains, (Domains{{0, 2}, {1}}));
  }
}

TEST(ProbeTest, APageWithAnotherNumberIsNotMapped) {
  testing::internal::CaptureStderr();
  const auto topologies = probe(3, std::nullopt, [](int rank, Bytes& bytes) {
    if (rank == 2 && bytes.size() > 3) {
      bytes[kNumberAt] ^= std::byte{1};
    }
  });
  const std::string said = testing::internal::GetCapturedStderr();
  for (const Topology& topology : topologies) {
    EXPECT_EQ(topology.domains, (Domains{{0, 1}, {2}}));
  }
  const std::string words = "topology: ranks 0 and 2 are on one host and share no memory: ";
  EXPECT_NE(said.find(words), std::string::npos) << said;
  EXPECT_EQ(std::ranges::count(said, '\n'), 1) << "by one rank: " << said;
}

TEST(ProbeTest, SettingsThatDifferAreNamedOnEveryRank) {
  run_threads(3, [](Group& group) {
    const auto swap = [&](std::span<const std::byte> block) { return group.all_gather(block); };
    const std::optional<int> setting = group.rank() == 2 ? std::optional(3) : std::nullopt;
    expect_error(
        ErrorCode::kInvalidArgument,
        "topology: WEFT_RANKS_PER_DOMAIN differs: 0 on rank 0, 3 on rank 2 (0: not set)",
        [&] {
          static_cast<void>(probe_topology(swap, [&] { return setting; }, {group.rank(), 3, {}}));
        }
    );
  });
}

TEST(ProbeTest, ASettingThatOneRankCannotReadIsNamedOnEveryRank) {
  run_threads(3, [](Group& group) {
    const auto swap = [&](std::span<const std::byte> block) { return group.all_gather(block); };
    const auto read = [&]() -> std::optional<int> {
      return group.rank() == 1 ? parse_env_int("WEFT_RANKS_PER_DOMAIN", "two", 1, 9) : 2;
    };
    expect_error(
        ErrorCode::kInvalidArgument,
        "environment: WEFT_RANKS_PER_DOMAIN = \"two\" is not a whole number in [1, 9], on rank 1",
        [&] {
          static_cast<void>(probe_topology(swap, read, {group.rank(), 3, {}}));
        }
    );
  });
}

TEST(ProbeTest, ABlockOfAnotherSizeIsNamed) {
  run_threads(2, [](Group& group) {
    expect_error(ErrorCode::kPeerFailed, "topology: rank 0 speaks version 0 in 5 B (here: ", [&] {
      static_cast<void>(Group::from_all_gather(group.rank(), 2, [&](std::span<const std::byte>) {
        return group.all_gather(Bytes(5));
      }));
    });
  });
}

}  // namespace
}  // namespace weft
