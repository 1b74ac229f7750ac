// SPDX-License-Identifier: Apache-2.0
#include "cpu/protocol/staging.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/case_data.hpp"
#include "unit/hosts/byte_spans.hpp"

namespace weft::test {
namespace {

// Returns the bytes that a peer may write, from its offset of each kind.
std::vector<ByteSpan> spans_of(
    const Staging& staging,
    const StagedRowBytes& bytes,
    size_t peer,
    const std::array<int64_t, 3>& counts
) {
  const auto [arrivals, routes, source_routes] = counts;
  return {
      span_of(staging.rows[peer], arrivals, bytes.rows),
      span_of(staging.scales[peer], arrivals, bytes.scales),
      span_of(staging.weights[peer], routes, bytes.weights),
      span_of(staging.source_weights[peer], source_routes, bytes.source_weights)};
}

class StagingTest : public testing::Test {
 protected:
  StagingTest() {
    ExchangeSetup setup;
    setup.num_ranks = 3;
    setup.num_experts = 6;
    Case spec;
    spec.num_tokens = {40, 0, 63};
    spec.topk = 4;
    data_ = make_case_data(setup, spec);
  }

  CaseData data_;
};

TEST_F(StagingTest, GivesEachSourceOfADispatchItsOwnRoom) {
  const StagedRowBytes bytes = {.rows = 48, .scales = 7, .weights = 4, .source_weights = 0};
  for (const Plan& plan : data_.plans) {
    const Staging staging = dispatch_staging(contents_of(plan), bytes);
    std::vector<ByteSpan> spans;
    for (size_t peer = 0; peer < 3; ++peer) {
      const Arrivals& pair = contents_of(plan).received[peer];
      if (static_cast<int>(peer) != plan.rank()) {
        std::ranges::copy(
            spans_of(staging, bytes, peer, {pair.size(), pair.num_routes(), 0}),
            std::back_inserter(spans)
        );
      }
    }
    expect_apart(spans, staging.num_bytes, 16);
  }
}

TEST_F(StagingTest, GivesEachExpertRankOfACombineItsOwnRoom) {
  const StagedRowBytes bytes = {.rows = 64, .scales = 0, .weights = 4, .source_weights = 4};
  for (const Plan& plan : data_.plans) {
    const Staging staging = combine_staging(contents_of(plan), bytes);
    std::vector<ByteSpan> spans;
    for (size_t peer = 0; peer < 3; ++peer) {
      const Arrivals& sent = contents_of(plan).sent[peer];
      const int64_t source_routes = contents_of(plan).received[peer].num_routes();
      if (static_cast<int>(peer) != plan.rank()) {
        std::ranges::copy(
            spans_of(staging, bytes, peer, {sent.size(), sent.num_routes(), source_routes}),
            std::back_inserter(spans)
        );
      }
    }
    expect_apart(spans, staging.num_bytes, 16);
  }
}

TEST_F(StagingTest, TakesNothingForWhatGoesStraightToItsSlots) {
  for (const Plan& plan : data_.plans) {
    EXPECT_EQ(dispatch_staging(contents_of(plan), {}).num_bytes, 0U);
    EXPECT_EQ(combine_staging(contents_of(plan), {}).num_bytes, 0U);
  }
}

}  // namespace
}  // namespace weft::test
