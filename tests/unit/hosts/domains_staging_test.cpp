// SPDX-License-Identifier: Apache-2.0
// Staging in a group of several domains: areas, and crossing tokens.
#include <gtest/gtest.h>

#include "byte_spans.hpp"
#include "cpu/protocol/staging.hpp"
#include "plan/domain_traffic.hpp"
#include "support/case_data.hpp"

namespace weft::test {
namespace {

class DomainsStagingTest : public testing::Test {
 protected:
  // Domains {0, 1, 2} and {3, 4}: rank 3 carries 0 and 2, rank 4 carries 1, rank 0 carries 3.
  DomainsStagingTest() {
    ExchangeSetup setup;
    setup.num_ranks = 5;
    setup.num_experts = 10;
    Case spec;
    spec.num_tokens = {40, 0, 63, 7, 50};
    spec.topk = 4;
    spec.calls = "";
    const CaseData data = make_case_data(setup, spec);
    for (const Plan& plan : data.plans) {
      PlanData& mine = plans_.emplace_back(contents_of(plan));
      auto domains = std::make_shared<const Domains>(kDomains, plan.rank());
      std::vector<std::vector<Arrivals>> forwarded;
      for (const int source : domains->forwarded()) {
        auto& pairs = forwarded.emplace_back();
        for (const int member : domains->near()) {
          const auto s = static_cast<size_t>(source);
          const auto m = static_cast<size_t>(member);
          pairs.push_back(member == plan.rank() ? Arrivals() : contents_of(data.plans[s]).sent[m]);
        }
      }
      mine.between = make_domain_traffic(mine, domains, std::move(forwarded));
    }
  }

  static inline const std::vector<std::vector<int>> kDomains = {{0, 1, 2}, {3, 4}};
  std::vector<PlanData> plans_;
};

TEST_F(DomainsStagingTest, GivesEachPairOfADispatchItsOwnRoom) {
  const StagedRowBytes bytes = {
      .rows = 48,
      .scales = 7,
      .weights = 4,
      .source_weights = 0,
      .crossing_rows = 48,
      .crossing_scales = 7};
  for (const PlanData& plan : plans_) {
    const Staging staging = dispatch_staging(plan, bytes);
    std::vector<ByteSpan> spans;
    for (size_t s = 0; s < 5; ++s) {
      if (static_cast<int>(s) == plan.shape.rank) {
        continue;
      }
      const Arrivals& pair = plan.received[s];
      const int64_t crossings = crossings_from(plan, s);
      spans.push_back(span_of(staging.weights[s], pair.num_routes(), 4));
      spans.push_back(span_of(staging.crossing_rows[s], crossings, 48));
      spans.push_back(span_of(staging.crossing_scales[s], crossings, 7));
      if (crossings == 0) {  // else its rows come as crossing tokens
        spans.push_back(span_of(staging.rows[s], pair.size(), 48));
        spans.push_back(span_of(staging.scales[s], pair.size(), 7));
      }
    }
    expect_apart(spans, staging.num_bytes);
  }
}

TEST_F(DomainsStagingTest, GivesEachAreaOfACombineItsOwnRoom) {
  const StagedRowBytes bytes = {
      .rows = 64, .scales = 0, .weights = 4, .source_weights = 4, .crossing_rows = 64};
  for (const PlanData& plan : plans_) {
    const Staging staging = combine_staging(plan, bytes);
    std::vector<ByteSpan> spans;
    for (size_t p = 0; p < 5; ++p) {
      if (static_cast<int>(p) == plan.shape.rank) {
        continue;
      }
      spans.push_back(span_of(staging.rows[p], rows_to(plan, p), 64));
      spans.push_back(span_of(staging.crossing_rows[p], crossings_to(plan, p), 64));
      spans.push_back(span_of(staging.weights[p], plan.sent[p].num_routes(), 4));
      spans.push_back(span_of(staging.source_weights[p], plan.received[p].num_routes(), 4));
    }
    expect_apart(spans, staging.num_bytes);
  }
}

// With direct outputs only what crosses is staged, on the rank that hands it on.
TEST_F(DomainsStagingTest, TakesRoomForCrossingTokensAlone) {
  for (const PlanData& plan : plans_) {
    int64_t crossings = 0;
    for (const ForwardedSource& forwarded : plan.between->forwarded) {
      crossings += forwarded.crossings.size();
    }
    const Staging staging = dispatch_staging(plan, {.crossing_rows = 64});
    EXPECT_EQ(staging.num_bytes, static_cast<uint64_t>(crossings) * 64);
  }
}

}  // namespace
}  // namespace weft::test
