// SPDX-License-Identifier: Apache-2.0
// Traffic that ranks of several domains derive, each for itself, must fit together.
#include "plan/domain_traffic.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "plan/build.hpp"
#include "plan/random_routing.hpp"

namespace weft {
namespace {

using Groups = std::vector<std::vector<int>>;

class DomainTrafficTest : public testing::TestWithParam<Groups> {
 protected:
  DomainTrafficTest() {
    for (const auto& members : GetParam()) {
      num_ranks_ += static_cast<int>(members.size());
    }
    std::vector<RouteTable> routes;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      routes.push_back(random_routing(
          {.num_tokens = rank == 1 ? 0 : 40 + rank,
           .num_experts = 2 * num_ranks_,
           .topk = 3,
           .hole_fraction = 0.3,
           .seed = 7},
          rank
      ));
    }
    for (const Plan& plan : build_plans(routes, 2 * num_ranks_, {})) {
      plans_.push_back(contents_of(plan));
    }
    for (int rank = 0; rank < num_ranks_; ++rank) {
      auto domains = std::make_shared<const Domains>(GetParam(), rank);
      std::vector<std::vector<Arrivals>> forwarded;
      for (const int source : domains->forwarded()) {
        auto& pairs = forwarded.emplace_back();
        for (const int member : domains->near()) {
          pairs.push_back(member == rank ? Arrivals() : sent(source, member));
        }
      }
      PlanData& plan = plans_[static_cast<size_t>(rank)];
      plan.between = make_domain_traffic(plan, domains, std::move(forwarded));
    }
  }

  [[nodiscard]] const PlanData& plan(int rank) const { return plans_[static_cast<size_t>(rank)]; }
  [[nodiscard]] const DomainTraffic& traffic(int rank) const { return *plan(rank).between; }
  [[nodiscard]] const Arrivals& sent(int from, int to) const {
    return plan(from).sent[static_cast<size_t>(to)];
  }

  int num_ranks_ = 0;
  std::vector<PlanData> plans_;
};

TEST_P(DomainTrafficTest, SourcesAndForwardersListTheSameTokens) {
  for (int source = 0; source < num_ranks_; ++source) {
    const DomainTraffic& own = traffic(source);
    for (int domain = 0; domain < own.domains->num_domains(); ++domain) {
      const auto& tokens = own.sent[static_cast<size_t>(domain)];
      if (domain == own.domains->own()) {
        EXPECT_TRUE(tokens.empty());
        continue;
      }
      std::set<int32_t> expected;
      for (const int member : own.domains->members(domain)) {
        const Arrivals& pair = sent(source, member);
        expected.insert(pair.token.begin(), pair.token.end());
      }
      EXPECT_TRUE(std::ranges::equal(tokens, expected));
      const int forwarder = own.domains->forwarder_into(domain, source);
      const ForwardedSource* forwarded = traffic(forwarder).find_forwarded(source);
      ASSERT_NE(forwarded, nullptr);
      EXPECT_EQ(forwarded->crossings.token, tokens);
      const auto members = own.domains->members(domain);
      for (size_t m = 0; m < members.size(); ++m) {
        EXPECT_EQ(forwarded_pair(plan(forwarder), *forwarded, m), sent(source, members[m]));
      }
    }
  }
}

TEST_P(DomainTrafficTest, BothEndsOfAnAreaAgreeOnIt) {
  for (int from = 0; from < num_ranks_; ++from) {
    const DomainTraffic& near = traffic(from);
    for (int to = 0; to < num_ranks_; ++to) {
      EXPECT_EQ(
          rows_to(plan(from), static_cast<size_t>(to)),
          rows_from(plan(to), static_cast<size_t>(from))
      );
      if (from == to || !near.domains->is_near(to)) {
        EXPECT_EQ(rows_to(plan(from), static_cast<size_t>(to)), 0);
        continue;
      }
      const auto m = static_cast<size_t>(near.domains->place_of(to));
      int64_t next = sent(from, to).size();
      for (const ForwardedSource& forwarded : near.forwarded) {
        const auto s = static_cast<size_t>(forwarded.source);
        EXPECT_EQ(forwarded.first_row[m], next);
        EXPECT_EQ(traffic(to).first_row[s], next);
        next += sent(forwarded.source, to).size();
      }
      EXPECT_EQ(next, rows_to(plan(from), static_cast<size_t>(to)));
    }
  }
}

TEST_P(DomainTrafficTest, KnowsTheDomainsOfEachToken) {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const DomainTraffic& own = traffic(rank);
    for (int64_t token = 0; token < plan(rank).shape.num_tokens; ++token) {
      const auto t = static_cast<size_t>(token);
      std::set<int> expected;
      for (auto a = plan(rank).token_begin[t]; a < plan(rank).token_begin[t + 1]; ++a) {
        const int to = plan(rank).token_arrivals[static_cast<size_t>(a)].rank;
        expected.insert(own.domains->domain_of(to));
      }
      std::vector<int> found;
      for (auto p = own.token_begin[t]; p < own.token_begin[t + 1]; ++p) {
        const TokenPart& part = own.token_parts[static_cast<size_t>(p)];
        found.push_back(part.domain);
        EXPECT_EQ(part.index == TokenPart::kHere, part.domain == own.domains->own());
        if (part.index != TokenPart::kHere) {
          const auto& tokens = own.sent[static_cast<size_t>(part.domain)];
          EXPECT_EQ(tokens[static_cast<size_t>(part.index)], token);
        }
      }
      EXPECT_TRUE(std::ranges::equal(found, expected));
    }
  }
}

// Rows that all ranks send across are those that all carry; without a forwarder there are more.
TEST_P(DomainTrafficTest, CountsWhatCrossesOnce) {
  CrossingCount all_sent;
  CrossingCount all_forwarded;
  int64_t wire_bytes = 0;
  int64_t handed_on = 0;
  int64_t near_arrivals = 0;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const CrossingCount mine = count_sent(plan(rank));
    const CrossingCount forwarded = count_forwarded(plan(rank));
    all_sent = {all_sent.rows + mine.rows, all_sent.arrivals + mine.arrivals};
    all_forwarded = {
        all_forwarded.rows + forwarded.rows, all_forwarded.arrivals + forwarded.arrivals};
    const Plan handle(std::make_shared<const PlanData>(plan(rank)));
    EXPECT_EQ(handle.crossing_bytes(16), 16 * mine.rows);
    wire_bytes += handle.wire_bytes(16);
    for (const ForwardedSource& one : traffic(rank).forwarded) {
      for (const Arrivals& pair : one.pairs) {
        handed_on += pair.size();
      }
    }
    for (int to = 0; to < num_ranks_; ++to) {
      near_arrivals += to != rank && traffic(rank).domains->is_near(to) ? sent(rank, to).size() : 0;
    }
  }
  EXPECT_EQ(all_sent.rows, all_forwarded.rows);
  EXPECT_EQ(all_sent.arrivals, all_forwarded.arrivals);
  EXPECT_LE(all_sent.rows, all_sent.arrivals);
  EXPECT_EQ(wire_bytes, 16 * (near_arrivals + handed_on + all_sent.rows));
}

INSTANTIATE_TEST_SUITE_P(
    All,
    DomainTrafficTest,
    testing::Values(
        Groups{{0, 1}, {2, 3}},
        Groups{{0, 1}, {2}},
        Groups{{0, 2, 4}, {1, 3}},
        Groups{{0}, {1}, {2}},
        Groups{{0, 1, 2, 3}, {4, 5}, {6}}
    )
);

}  // namespace
}  // namespace weft
