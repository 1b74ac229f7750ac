// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "plan/domain_traffic.hpp"

namespace weft {
namespace {

using Groups = std::vector<std::vector<int>>;

const std::vector<Groups>& all_groups() {
  static const std::vector<Groups> groups = {
      {{0}},
      {{0, 1, 2}},
      {{0, 1}, {2, 3}},
      {{0, 1}, {2}},
      {{0, 2, 4}, {1, 3}},
      {{0}, {1}, {2}},
      {{0, 1, 2, 3, 4}, {5, 6}, {7}}};
  return groups;
}

int num_ranks_of(const Groups& groups) {
  size_t count = 0;
  for (const auto& members : groups) {
    count += members.size();
  }
  return static_cast<int>(count);
}

TEST(DomainsTest, CarriesToTheSamePlaceInDomainsOfOneSize) {
  const Domains domains({{0, 1}, {2, 3}}, 3);
  EXPECT_EQ(domains.forwarder(0, 2), 2);
  EXPECT_EQ(domains.forwarder(0, 3), 2);
  EXPECT_EQ(domains.forwarder(1, 2), 3);
  EXPECT_EQ(domains.forwarder(3, 1), 1);
  EXPECT_EQ(domains.forwarder(3, 2), 3);  // nobody is needed in one domain
  EXPECT_EQ(domains.between(0), 2);
  EXPECT_EQ(domains.between(1), -1);  // this rank carries it
  EXPECT_EQ(domains.between(2), -1);
}

TEST(DomainsTest, SharesSourcesOutWhereDomainsDiffer) {
  const Domains domains({{0, 1, 2, 3, 4}, {5, 6}, {7}}, 6);
  const auto forwarded = domains.forwarded();
  EXPECT_EQ(std::vector<int>(forwarded.begin(), forwarded.end()), (std::vector<int>{1, 3}));
  const auto by_five = domains.forwarded_by(5);
  EXPECT_EQ(std::vector<int>(by_five.begin(), by_five.end()), (std::vector<int>{0, 2, 4, 7}));
  EXPECT_EQ(domains.forwarder_into(2, 4), 7);
  EXPECT_EQ(domains.max_members(), 5);
}

TEST(DomainsTest, AgreesOnForwardersOnAllRanks) {
  for (const Groups& groups : all_groups()) {
    const int num_ranks = num_ranks_of(groups);
    for (int source = 0; source < num_ranks; ++source) {
      for (int to = 0; to < num_ranks; ++to) {
        const int forwarder = Domains(groups, 0).forwarder(source, to);
        for (int viewer = 1; viewer < num_ranks; ++viewer) {
          EXPECT_EQ(Domains(groups, viewer).forwarder(source, to), forwarder);
        }
        const Domains there(groups, to);
        EXPECT_TRUE(there.is_near(forwarder));
        if (forwarder != source) {
          EXPECT_TRUE(std::ranges::count(there.forwarded_by(forwarder), source) == 1);
        }
      }
    }
  }
}

TEST(DomainsTest, NumbersEachPairOfAForwarderOnce) {
  for (const Groups& groups : all_groups()) {
    const int num_ranks = num_ranks_of(groups);
    size_t most_pairs = 0;
    for (int forwarder = 0; forwarder < num_ranks; ++forwarder) {
      const Domains here(groups, forwarder);
      std::set<uint32_t> numbers;
      size_t num_pairs = 0;
      for (const int member : here.near()) {
        for (const int source : here.forwarded()) {
          numbers.insert(Domains(groups, member).pair_at_forwarder(source));
          ++num_pairs;
        }
      }
      EXPECT_EQ(numbers.size(), num_pairs);
      EXPECT_TRUE(numbers.empty() || *numbers.rbegin() + 1 == num_pairs);
      most_pairs = std::max(most_pairs, num_pairs);
    }
    EXPECT_EQ(Domains(groups, 0).max_forwarded_pairs(), most_pairs);
  }
  EXPECT_EQ(Domains({{0, 1, 2}}, 1).max_forwarded_pairs(), 0U);
}

}  // namespace
}  // namespace weft
