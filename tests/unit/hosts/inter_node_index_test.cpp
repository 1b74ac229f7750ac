// SPDX-License-Identifier: Apache-2.0
// The index of every rank, where it was written to, against the routing.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "domain_plans.hpp"
#include "hosts/plan_image.hpp"

namespace weft::test {
namespace {

using Groups = std::vector<std::vector<int>>;

// Index as written into plain memory.
class WrittenIndex {
 public:
  explicit WrittenIndex(const PlanData& plan) {
    const InterNodeIndex index(plan);
    bytes_.resize(index.num_bytes());
    index.write(bytes_.data());
    arrays_ = index.at(bytes_.data());
  }

  [[nodiscard]] size_t num_domains() const { return arrays_.sent.size(); }
  [[nodiscard]] std::vector<int32_t> sent(size_t domain, size_t count) const {
    return {arrays_.sent[domain], arrays_.sent[domain] + count};
  }
  // Returns row, source and token of each of `count` rows.
  [[nodiscard]] std::vector<std::array<int32_t, 3>> row_sources(int64_t count) const {
    std::vector<std::array<int32_t, 3>> rows(static_cast<size_t>(count));
    std::copy_n(arrays_.row_sources, 3 * count, rows.data()->data());
    return rows;
  }
  [[nodiscard]] std::vector<int32_t> parts(size_t token) const {
    return {
        arrays_.part_row + arrays_.part_begin[token],
        arrays_.part_row + arrays_.part_begin[token + 1]};
  }
  [[nodiscard]] int32_t weight_row(size_t route) const { return arrays_.weight_row[route]; }
  [[nodiscard]] bool has_columns() const { return arrays_.weight_column != nullptr; }
  [[nodiscard]] int32_t weight_column(size_t route) const { return arrays_.weight_column[route]; }

 private:
  std::vector<std::byte> bytes_;
  InterNodeArrays<const int32_t*> arrays_;
};

class InterNodeIndexTest : public testing::TestWithParam<Groups> {
 protected:
  // visit(plans, rank)
  template <class Visit>
  static void for_each_rank(const Visit& visit) {
    for (const PlanVariant& variant : plan_variants()) {
      SCOPED_TRACE(variant.name);
      const DomainPlans plans(GetParam(), variant);
      for (int rank = 0; rank < plans.num_ranks(); ++rank) {
        SCOPED_TRACE(::testing::Message() << "rank " << rank);
        visit(plans, rank);
      }
    }
  }
  static size_t domain_of(int rank) {
    size_t domain = 0;
    while (!std::ranges::count(GetParam()[domain], rank)) {
      ++domain;
    }
    return domain;
  }

  // Returns the row of each part by (token, domain), counted from what the routing says.
  static std::map<std::pair<int32_t, size_t>, int32_t> part_rows(
      const DomainPlans& plans, int rank
  ) {
    std::map<std::pair<int32_t, size_t>, int32_t> rows;
    auto next = static_cast<int32_t>(plans.plan(rank).shape.num_tokens);
    for (size_t domain = 0; domain < GetParam().size(); ++domain) {
      const bool is_own = domain == domain_of(rank);
      for (const int32_t token : plans.tokens_into(rank, GetParam()[domain])) {
        rows[{token, domain}] = is_own ? token : next++;
      }
    }
    return rows;
  }
};

TEST_P(InterNodeIndexTest, ListsTheTokensThatCrossToEachDomain) {
  for_each_rank([](const DomainPlans& plans, int rank) {
    const WrittenIndex index(plans.plan(rank));
    ASSERT_EQ(index.num_domains(), GetParam().size());
    for (size_t domain = 0; domain < GetParam().size(); ++domain) {
      if (domain != domain_of(rank)) {
        const auto tokens = plans.tokens_into(rank, GetParam()[domain]);
        EXPECT_EQ(index.sent(domain, tokens.size()), tokens);
      }
    }
  });
}

TEST_P(InterNodeIndexTest, ListsWhereTheRowsComeFrom) {
  for_each_rank([](const DomainPlans& plans, int rank) {
    const PlanData& plan = plans.plan(rank);
    std::set<std::array<int32_t, 3>> expected;  // routes share a row in rank_major
    for (int source = 0; source < plans.num_ranks(); ++source) {
      for (int32_t token = 0; token < plans.plan(source).shape.num_tokens; ++token) {
        for (const KeptRoute& route : plans.routes(source, token, rank)) {
          expected.insert({route.slot, source, token});
        }
      }
    }
    auto rows = WrittenIndex(plan).row_sources(num_used_rows(plan));
    std::ranges::sort(rows);
    EXPECT_TRUE(std::ranges::equal(rows, expected));
  });
}

TEST_P(InterNodeIndexTest, GivesEachTokenTheRowsOfItsPartsByDomain) {
  for_each_rank([](const DomainPlans& plans, int rank) {
    const WrittenIndex index(plans.plan(rank));
    const auto rows = part_rows(plans, rank);
    auto next = rows.begin();  // ascending token, then domain
    for (int32_t token = 0; token < plans.plan(rank).shape.num_tokens; ++token) {
      std::vector<int32_t> expected;
      for (; next != rows.end() && next->first.first == token; ++next) {
        expected.push_back(next->second);
      }
      ASSERT_EQ(index.parts(static_cast<size_t>(token)), expected) << "token " << token;
    }
    EXPECT_EQ(next, rows.end());
  });
}

TEST_P(InterNodeIndexTest, SaysWhichPartHasTheWeightOfARoute) {
  for_each_rank([](const DomainPlans& plans, int rank) {
    const PlanData& plan = plans.plan(rank);
    const WrittenIndex index(plan);
    const auto rows = part_rows(plans, rank);
    std::vector<int32_t> expected(plan.route_expert.size(), -1);
    for (int receiver = 0; receiver < plans.num_ranks(); ++receiver) {
      for (int32_t token = 0; token < plan.shape.num_tokens; ++token) {
        for (const KeptRoute& route : plans.routes(rank, token, receiver)) {
          const auto place = static_cast<size_t>(token * plan.shape.topk + route.k);
          expected[place] = rows.at({token, domain_of(receiver)});
        }
      }
    }
    for (size_t route = 0; route < expected.size(); ++route) {
      ASSERT_EQ(index.weight_row(route), expected[route]) << "route " << route;
    }
  });
}

TEST_P(InterNodeIndexTest, NamesTheColumnsOfAMapsWeights) {
  for_each_rank([](const DomainPlans& plans, int rank) {
    const PlanData& plan = plans.plan(rank);
    const WrittenIndex index(plan);
    ASSERT_EQ(index.has_columns(), plan.shape.from_map);
    for (size_t route = 0; plan.shape.from_map && route < plan.route_expert.size(); ++route) {
      ASSERT_EQ(index.weight_column(route), plan.route_expert[route]) << "route " << route;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    InterNodeIndexTest,
    testing::Values(
        Groups{{0}, {1}},
        Groups{{0, 1}, {2, 3}},
        Groups{{0, 2}, {1, 3, 4}},
        Groups{{0}, {1, 2}, {3}}
    )
);

}  // namespace
}  // namespace weft::test
