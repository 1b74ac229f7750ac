// SPDX-License-Identifier: Apache-2.0
// Images of every round, brought into plan blocks as the kernel does, against the routing.
#include "hosts/plan_image.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>

#include "played_round.hpp"

namespace weft::test {
namespace {

using Groups = std::vector<std::vector<int>>;

class PlanImageTest : public testing::TestWithParam<Groups> {
 protected:
  static void for_each_world(const std::function<void(const DomainPlans&)>& visit) {
    for (const PlanVariant& variant : plan_variants()) {
      SCOPED_TRACE(variant.name);
      const DomainPlans plans(GetParam(), variant);
      bool has_drops = false;
      for (int rank = 0; rank < plans.num_ranks(); ++rank) {
        has_drops = has_drops || plans.plan(rank).overflow;
      }
      ASSERT_EQ(has_drops, variant.has_drops);
      visit(plans);
    }
  }
  static void play_rounds(
      const DomainPlans& plans, const std::function<void(const PlayedRound&)>& visit
  ) {
    for (const std::vector<int>& members : GetParam()) {
      const size_t rounds = num_rounds(plans.plan(members[0]));
      for (size_t round = 0; round < rounds; ++round) {
        SCOPED_TRACE(::testing::Message() << "round " << round << " of rank " << members[0]);
        visit(PlayedRound(plans, members, round));
      }
    }
  }
  static void for_each_round(const std::function<void(const PlayedRound&)>& visit) {
    for_each_world([&](const DomainPlans& plans) { play_rounds(plans, visit); });
  }
};

template <class T>
std::vector<T> copy_of(const T* from, size_t count) {
  return {from, from + count};
}

TEST_P(PlanImageTest, RanksOfADomainCountTheSameRounds) {
  for_each_world([](const DomainPlans& plans) {
    for (const std::vector<int>& members : GetParam()) {
      size_t most = 0;
      for (const int member : members) {
        EXPECT_EQ(num_rounds(plans.plan(member)), num_rounds(plans.plan(members[0])));
        most = std::max(most, plans.plan(member).between->forwarded.size());
      }
      EXPECT_EQ(num_rounds(plans.plan(members[0])), 1 + most);
    }
  });
}

TEST_P(PlanImageTest, KnowsTheShapeOfTheOutput) {
  for_each_round([](const PlayedRound& round) {
    for (size_t m = 0; m < round.members().size(); ++m) {
      const PlanData& plan = round.plan(m);
      const PlanView block = round.block(m);
      const PlanHeader& header = *block.header();
      EXPECT_EQ(header.num_tokens, static_cast<int32_t>(round.tokens(m).size()));
      EXPECT_EQ(header.overflow, plan.overflow ? 1 : 0);
      EXPECT_EQ(header.short_rank, -1);
      EXPECT_EQ(header.num_rows, plan.num_rows);
      EXPECT_EQ(header.required_rows, plan.required_rows);
      EXPECT_EQ(header.expert_stride, plan.shape.options.expert_stride);
      const size_t experts = plan.rows_per_expert.size();
      EXPECT_EQ(copy_of(block.rows_per_expert(), experts), plan.rows_per_expert);
      EXPECT_EQ(copy_of(block.expert_begin(), experts), plan.expert_begin);
    }
  });
}

TEST_P(PlanImageTest, ClearsPaddingInTheFirstRoundAlone) {
  for_each_round([](const PlayedRound& round) {
    for (size_t m = 0; m < round.members().size(); ++m) {
      const PlanData& plan = round.plan(m);
      const PlanView block = round.block(m);
      std::vector<std::pair<int64_t, int64_t>> padding;
      for (size_t e = 0; e < plan.rows_per_expert.size(); ++e) {
        const int64_t begin = block.expert_begin()[e];
        const int64_t kept_end = begin + block.rows_per_expert()[e];
        const int64_t end = begin + block.padded_rows_per_expert()[e];
        if (plan.shape.options.layout != Layout::kRankMajor && kept_end < end) {
          padding.emplace_back(kept_end, end);
        }
      }
      const auto none = std::vector<std::pair<int64_t, int64_t>>();
      EXPECT_EQ(padding, round.index() == 0 ? plan.padding : none);
    }
  });
}

TEST_P(PlanImageTest, KeepsTheRoutesIntoTheDomain) {
  for_each_round([](const PlayedRound& round) {
    for (size_t m = 0; m < round.members().size(); ++m) {
      const std::vector<int32_t>& tokens = round.tokens(m);
      const int per_rank = round.plan(m).shape.num_local_experts();
      std::vector<int32_t> experts(tokens.size() * kMaxTopk, -1);
      std::vector<int32_t> slots(experts.size(), -1);
      std::vector<float> weights(experts.size(), 0.0F);
      for (size_t t = 0; t < tokens.size(); ++t) {
        for (size_t to = 0; to < round.members().size(); ++to) {
          for (const KeptRoute& route : round.routes(m, tokens[t], to)) {
            const size_t place = t * kMaxTopk + static_cast<size_t>(route.k);
            experts[place] = static_cast<int32_t>(to) * per_rank + route.expert;
            slots[place] = route.slot;
            weights[place] = route.weight;
          }
        }
      }
      const PlanView block = round.block(m);
      EXPECT_EQ(copy_of(block.route_expert(), experts.size()), experts);
      EXPECT_EQ(copy_of(block.route_slot(), slots.size()), slots);
      EXPECT_EQ(copy_of(block.route_weight(), weights.size()), weights);
    }
  });
}

TEST_P(PlanImageTest, NumbersArrivalsInTokenOrder) {
  for_each_round([](const PlayedRound& round) {
    const size_t members = round.members().size();
    for (size_t m = 0; m < members; ++m) {
      const std::vector<int32_t>& tokens = round.tokens(m);
      std::vector<int32_t> primary(tokens.size() * members, -1);
      std::vector<int32_t> number(primary.size(), -1);
      for (size_t to = 0; to < members; ++to) {
        int32_t next = 0;
        for (const int32_t token : round.arrivals(m, to)) {
          const size_t place = static_cast<size_t>(token) * members + to;
          primary[place] = round.routes(m, tokens[static_cast<size_t>(token)], to)[0].slot;
          number[place] = next++;
        }
      }
      EXPECT_EQ(copy_of(round.block(m).primary(), primary.size()), primary);
      EXPECT_EQ(copy_of(round.block(m).arrival(), number.size()), number);
    }
  });
}

TEST_P(PlanImageTest, CountsWhatEachRankSendsToEach) {
  for_each_round([](const PlayedRound& round) {
    const size_t members = round.members().size();
    for (size_t m = 0; m < members; ++m) {
      const PlanView block = round.block(m);
      int32_t from_before = 0;
      for (size_t peer = 0; peer < members; ++peer) {
        EXPECT_EQ(block.tokens_of()[peer], static_cast<int32_t>(round.tokens(peer).size()));
        EXPECT_EQ(block.received_base()[peer], from_before);
        const auto received = static_cast<int32_t>(round.arrivals(peer, m).size());
        EXPECT_EQ(block.received()[peer], received);
        from_before += received;
        // Both ends put the pair (m, peer) at the same place of the staging.
        EXPECT_EQ(block.arrival_base()[peer], round.block(peer).received_base()[m]);
      }
    }
  });
}

TEST_P(PlanImageTest, TellsReceiversTheRoutesOfEachArrival) {
  for_each_round([](const PlayedRound& round) {
    for (size_t m = 0; m < round.members().size(); ++m) {
      for (size_t from = 0; from < round.members().size(); ++from) {
        const std::vector<int32_t>& tokens = round.tokens(from);
        const std::vector<int32_t> arrivals = round.arrivals(from, m);
        const PlanView block = round.block(m);
        const auto source = static_cast<uint32_t>(from);
        ASSERT_EQ(block.received()[from], static_cast<int32_t>(arrivals.size()));
        for (size_t i = 0; i < arrivals.size(); ++i) {
          const auto routes = round.routes(from, tokens[static_cast<size_t>(arrivals[i])], m);
          ASSERT_EQ(block.heads(source)[i].token, arrivals[i]);
          ASSERT_EQ(block.heads(source)[i].num_routes, static_cast<int32_t>(routes.size()));
          for (size_t j = 0; j < routes.size(); ++j) {
            const size_t at = i * kMaxTopk + j;
            ASSERT_EQ(block.slots(source)[at], routes[j].slot);
            ASSERT_EQ(block.weights(source)[at], routes[j].weight);
            ASSERT_EQ(block.origins(source)[at], routes[j].expert << 8 | routes[j].k);
          }
        }
      }
    }
  });
}

// Rows returned for a token lie side by side, ascending rank: the order of combine's sum.
TEST_P(PlanImageTest, GivesEachArrivalARowToReturnTo) {
  for_each_round([](const PlayedRound& round) {
    const size_t members = round.members().size();
    const auto per_token = static_cast<int32_t>(std::min<size_t>(members, DomainPlans::kTopk));
    for (size_t from = 0; from < members; ++from) {
      std::map<int32_t, int32_t> num_ranks;  // by token
      std::set<int32_t> rows;
      for (size_t to = 0; to < members; ++to) {
        const PlanView block = round.block(to);
        for (int32_t i = 0; i < block.received()[from]; ++i) {
          const ArrivalHead& head = block.heads(static_cast<uint32_t>(from))[i];
          ASSERT_EQ(head.return_row, head.token * per_token + num_ranks[head.token]++);
          ASSERT_TRUE(rows.insert(head.return_row).second);
        }
      }
      const auto tokens = static_cast<int32_t>(round.tokens(from).size());
      EXPECT_TRUE(rows.empty() || *rows.rbegin() < tokens * per_token);
    }
  });
}

TEST_P(PlanImageTest, CutsArrivalsIntoTheChunksOfTheirTokens) {
  int longest = 0;
  for_each_round([&](const PlayedRound& round) {
    for (size_t from = 0; from < round.members().size(); ++from) {
      const auto tokens = static_cast<int64_t>(round.tokens(from).size());
      longest = std::max(longest, round.index() == 0 ? 0 : chunk_tokens(tokens));
      for (size_t to = 0; to < round.members().size(); ++to) {
        const PlanView block = round.block(to);
        const auto source = static_cast<uint32_t>(from);
        const int32_t* begin = block.chunk_begin(source);
        EXPECT_EQ(begin[0], 0);
        for (int chunk = 0; chunk < num_device_chunks(tokens); ++chunk) {
          ASSERT_LE(begin[chunk], begin[chunk + 1]);
          for (int32_t i = begin[chunk]; i < begin[chunk + 1]; ++i) {
            ASSERT_EQ(block.heads(source)[i].token / chunk_tokens(tokens), chunk);
          }
        }
        EXPECT_EQ(begin[num_device_chunks(tokens)], block.received()[from]);
      }
    }
  });
  EXPECT_EQ(longest, kLongChunkTokens) << "too few tokens cross";
}

TEST_P(PlanImageTest, RoundsCoverWhatEachRankReceives) {
  for_each_world([](const DomainPlans& plans) {
    std::map<std::pair<int, int>, Arrivals> found;  // by source, receiver
    play_rounds(plans, [&](const PlayedRound& round) {
      for (size_t from = 0; from < round.members().size(); ++from) {
        const std::vector<int32_t>& tokens = round.tokens(from);
        for (size_t to = 0; to < round.members().size() && round.source(from) >= 0; ++to) {
          const PlanShape& shape = round.plan(to).shape;
          const std::pair pair(round.source(from), round.members()[to]);
          ASSERT_FALSE(found.contains(pair));
          Arrivals& all = found[pair];
          all.one_row = shape.options.layout == Layout::kRankMajor;
          all.route_begin.push_back(0);
          const PlanView block = round.block(to);
          const auto source = static_cast<uint32_t>(from);
          for (int32_t i = 0; i < block.received()[from]; ++i) {
            const ArrivalHead& head = block.heads(source)[i];
            all.token.push_back(tokens.at(static_cast<size_t>(head.token)));
            const size_t first = static_cast<size_t>(i) * kMaxTopk;
            for (size_t at = first; at < first + static_cast<size_t>(head.num_routes); ++at) {
              all.slot.push_back(block.slots(source)[at]);
              all.k.push_back(block.origins(source)[at] & 0xff);
              all.expert.push_back(block.origins(source)[at] >> 8);
              if (shape.has_weights) {
                all.weight.push_back(block.weights(source)[at]);
              }
            }
            all.route_begin.push_back(static_cast<int32_t>(all.slot.size()));
          }
        }
      }
    });
    for (int to = 0; to < plans.num_ranks(); ++to) {
      for (int from = 0; from < plans.num_ranks(); ++from) {
        const Arrivals& received = plans.plan(to).received[static_cast<size_t>(from)];
        ASSERT_TRUE(found.contains({from, to})) << from << " to " << to;
        EXPECT_TRUE((found[{from, to}] == received)) << from << " to " << to;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    PlanImageTest,
    testing::Values(
        Groups{{0, 1}, {2, 3}},
        Groups{{0, 1}, {2}},
        Groups{{0, 2, 4}, {1, 3}},
        Groups{{0}, {1}, {2}},
        Groups{{3, 4, 5, 6}, {0, 1}, {2}},
        Groups{{0, 5}, {1, 2, 3, 4}}
    )
);

}  // namespace
}  // namespace weft::test
