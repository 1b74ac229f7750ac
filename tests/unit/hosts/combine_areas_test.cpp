// SPDX-License-Identifier: Apache-2.0
// Areas of a combine between domains lie side by side, and are large enough.
#include <gtest/gtest.h>

#include <functional>

#include "byte_spans.hpp"
#include "domain_plans.hpp"
#include "hosts/call_memory.hpp"

namespace weft::test {
namespace {

const std::vector<std::vector<int>> kDomains = {{0, 1, 2}, {3, 4}, {5}};

struct Chunks {
  MessageFormat sums;
  MessageFormat weights;
};

// Few rows to a message, so that areas have several.
void for_each_areas(
    const std::function<void(const PlanData&, const Chunks&, const CombineAreas&)>& visit
) {
  const DomainPlans plans(kDomains, plan_variants()[1]);
  for (const int64_t row_bytes : {16, 14336}) {
    for (const int64_t weight_bytes : {0, 12}) {
      for (int rank = 0; rank < plans.num_ranks(); ++rank) {
        SCOPED_TRACE(::testing::Message() << row_bytes << " " << weight_bytes << " rank " << rank);
        const Chunks chunks = {
            .sums = {row_bytes, weight_bytes, 0, 7}, .weights = {0, weight_bytes, 0, 5}};
        const PlanData& plan = plans.plan(rank);
        visit(plan, chunks, CombineAreas(plan, chunks.sums, chunks.weights));
      }
    }
  }
}

constexpr uint64_t kNoEnd = uint64_t{1} << 60;

TEST(CombineAreasTest, StagedAreasAreApart) {
  for_each_areas([](const PlanData& plan, const Chunks& chunks, const CombineAreas& areas) {
    const DomainTraffic& traffic = *plan.between;
    std::vector<ByteSpan> spans;
    for (size_t i = 0; i < traffic.forwarded.size(); ++i) {
      const int64_t bytes = chunks.weights.area_bytes(traffic.forwarded[i].crossings.size());
      spans.push_back(span_of(areas.staged_weights.at(i), bytes, 1));
    }
    for (size_t domain = 0; domain < traffic.sent.size(); ++domain) {
      const auto count = static_cast<int64_t>(traffic.sent[domain].size());
      spans.push_back(span_of(areas.staged_sums.at(domain), chunks.sums.area_bytes(count), 1));
    }
    expect_apart(spans, kNoEnd, AreaMap::kAlignment);
  });
}

TEST(CombineAreasTest, MessagesAreApartAndNumberedInOneSequence) {
  for_each_areas([](const PlanData& plan, const Chunks& chunks, const CombineAreas& areas) {
    const DomainTraffic& traffic = *plan.between;
    std::vector<ByteSpan> spans;
    int64_t next = 0;
    for (size_t i = 0; i < traffic.forwarded.size(); ++i) {
      const int64_t count = traffic.forwarded[i].crossings.size();
      spans.push_back(span_of(areas.sum_messages.at(i).offset, chunks.sums.area_bytes(count), 1));
      EXPECT_EQ(areas.sum_messages.at(i).first, next);
      next += chunks.sums.num_chunks(count);
    }
    for (size_t domain = 0; domain < traffic.sent.size(); ++domain) {
      const auto count = static_cast<int64_t>(traffic.sent[domain].size());
      spans.push_back(
          span_of(areas.weight_messages.at(domain).offset, chunks.weights.area_bytes(count), 1)
      );
      EXPECT_EQ(areas.weight_messages.at(domain).first, next);
      next += chunks.weights.num_chunks(count);
    }
    expect_apart(spans, kNoEnd, AreaMap::kAlignment);
  });
}

// This rank's own tokens come first among the parts, then those that crossed, domain by domain.
TEST(CombineAreasTest, WorkHoldsEveryPartAndEveryForwardedSum) {
  for_each_areas([](const PlanData& plan, const Chunks& chunks, const CombineAreas& areas) {
    const DomainTraffic& traffic = *plan.between;
    const auto each = [](int64_t bytes) { return static_cast<uint64_t>(bytes); };
    std::vector<ByteSpan> spans;
    for (size_t i = 0; i < traffic.forwarded.size(); ++i) {
      const int64_t count = traffic.forwarded[i].crossings.size();
      const ForwardedArea& sums = areas.forwarded.at(i);
      spans.push_back(span_of(sums.rows, count, each(chunks.sums.row_bytes)));
      spans.push_back(span_of(sums.weights, count, each(chunks.sums.weight_bytes)));
      spans.push_back(span_of(sums.extra, count, each(chunks.weights.weight_bytes)));
    }
    int64_t parts = plan.shape.num_tokens;
    for (size_t domain = 0; domain < traffic.sent.size(); ++domain) {
      EXPECT_EQ(areas.first_part.at(domain), parts);
      parts += static_cast<int64_t>(traffic.sent[domain].size());
    }
    const int64_t tokens = plan.shape.num_tokens;
    spans.push_back(span_of(areas.parts, parts, each(chunks.sums.row_bytes)));
    spans.push_back(span_of(areas.part_weights, parts, each(chunks.sums.weight_bytes)));
    spans.push_back(span_of(areas.own_weights, tokens, each(chunks.weights.weight_bytes)));
    expect_apart(spans, kNoEnd, AreaMap::kAlignment);
  });
}

}  // namespace
}  // namespace weft::test
