// SPDX-License-Identifier: Apache-2.0
// Areas of a dispatch between domains lie apart, and the room reserved is enough for it and for a
// combine.
#include <gtest/gtest.h>

#include <numeric>

#include "byte_spans.hpp"
#include "domain_plans.hpp"
#include "hosts/call_memory.hpp"

namespace weft::test {
namespace {

TEST(DispatchAreasTest, AreasAreApartAndMessagesNumberedInOneSequence) {
  const DomainPlans plans({{0, 1, 2}, {3, 4}, {5}}, plan_variants()[1]);
  const MessageFormat chunk = {48, 12, 7, 7};  // few rows to a message
  for (int rank = 0; rank < plans.num_ranks(); ++rank) {
    SCOPED_TRACE(rank);
    const PlanData& plan = plans.plan(rank);
    const DispatchAreas areas(plan, chunk);
    std::vector<ByteSpan> staged;
    std::vector<ByteSpan> work;
    for (size_t i = 0; i < plan.between->forwarded.size(); ++i) {
      const int64_t count = plan.between->forwarded[i].crossings.size();
      staged.push_back(span_of(areas.staged.at(i), chunk.area_bytes(count), 1));
      work.push_back(span_of(areas.forwarded.at(i).rows, count, 48));
      work.push_back(span_of(areas.forwarded.at(i).weights, count, 12));
      work.push_back(span_of(areas.forwarded.at(i).extra, count, 7));
    }
    work.push_back(span_of(areas.own_weights, plan.shape.num_tokens, 12));
    std::vector<ByteSpan> messages;
    int64_t next = 0;
    for (size_t domain = 0; domain < plan.between->sent.size(); ++domain) {
      const auto count = static_cast<int64_t>(plan.between->sent[domain].size());
      messages.push_back(span_of(areas.messages.at(domain).offset, chunk.area_bytes(count), 1));
      EXPECT_EQ(areas.messages.at(domain).first, next);
      next += chunk.num_chunks(count);
    }
    EXPECT_EQ(areas.room.num_messages, static_cast<uint64_t>(next));
    expect_apart(staged, areas.room.staging, AreaMap::kAlignment);
    expect_apart(messages, areas.room.messages, AreaMap::kAlignment);
    expect_apart(work, areas.room.work, AreaMap::kAlignment);
  }
}

// All tokens of this rank cross to `crossed` other domains in turn, all of each forwarded source's
// come here.
PlanData busiest(const CallBounds& bounds, size_t crossed) {
  PlanData plan;
  plan.shape.num_tokens = bounds.max_tokens;
  auto traffic = std::make_shared<DomainTraffic>();
  traffic->sent.resize(bounds.num_others + 1);
  for (int64_t token = 0; token < bounds.max_tokens; ++token) {
    for (size_t i = 0; i < crossed; ++i) {
      const size_t domain = (static_cast<size_t>(token) + i) % bounds.num_others;
      traffic->sent[domain].push_back(static_cast<int32_t>(token));
    }
  }
  for (uint64_t i = 0; i < bounds.num_forwarded; ++i) {
    ForwardedSource& forwarded = traffic->forwarded.emplace_back();
    forwarded.crossings.token.resize(static_cast<size_t>(bounds.max_tokens));
  }
  plan.between = std::move(traffic);
  return plan;
}

TEST(CallRoomTest, HoldsTheBusiestCalls) {
  for (const uint64_t others : {1U, 3U, 20U}) {
    for (const uint64_t forwarded : {0U, 1U, 5U}) {
      for (const int64_t tokens : {1, 100, 5000}) {
        for (const int64_t row_bytes : {16, 14336}) {
          SCOPED_TRACE(
              ::testing::Message() << others << " domains, " << forwarded << " sources, " << tokens
                                   << " tokens of " << row_bytes << " B"
          );
          const int64_t weight_bytes = 4 * 4;
          const int64_t scale_bytes = 23;
          CallBounds bounds = {
              .num_others = others,
              .num_forwarded = forwarded,
              .max_tokens = tokens,
              .max_topk = 4,
              .token_bytes = row_bytes + weight_bytes + scale_bytes};
          const PlanData plan = busiest(bounds, std::min<size_t>(others, 4));
          const MessageFormat rows =
              message_format(row_bytes, weight_bytes, scale_bytes, kChunkArrivals);
          EXPECT_TRUE(room_of_calls(bounds).holds(DispatchAreas(plan, rows).room));

          bounds.token_bytes = row_bytes + 2 * weight_bytes;
          const MessageFormat sums = message_format(row_bytes, weight_bytes, 0, kChunkArrivals);
          const MessageFormat weights = {.weight_bytes = weight_bytes, .rows = tokens};
          EXPECT_TRUE(room_of_calls(bounds).holds(CombineAreas(plan, sums, weights).room));
        }
      }
    }
  }
}

TEST(CallRoomTest, DoesNotHoldMore) {
  const CallRoom room = {4, 3, 2, 1};
  EXPECT_TRUE(room.holds({4, 3, 2, 1}));
  EXPECT_FALSE(room.holds({5, 3, 2, 1}));
  EXPECT_FALSE(room.holds({4, 4, 2, 1}));
  EXPECT_FALSE(room.holds({4, 3, 3, 1}));
  EXPECT_FALSE(room.holds({4, 3, 2, 2}));
}

}  // namespace
}  // namespace weft::test
