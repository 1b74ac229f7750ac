// SPDX-License-Identifier: Apache-2.0
// Runs one call that must be refused on every rank, and shows that the exchange works afterwards.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "support/case_data.hpp"
#include "support/errors.hpp"

namespace weft::test {

// The world of these tests: three ranks, one good case whose inputs a test spoils.
struct RefusalWorld {
  RefusalWorld();
  ExchangeSetup setup;
  CaseData good;  // calls: a dispatch, then a combine
};

// Exchange, plan and arguments for the calls of one rank.
struct RefusalRank {
  Exchange& exchange;
  int rank;
  const CaseData& good;
  Plan plan;

  [[nodiscard]] Routing routing() const { return data().routing(); }
  [[nodiscard]] PlanOptions options() const { return data().options; }
  [[nodiscard]] DispatchInput dispatch_input() const { return call(0).dispatch_input(); }
  [[nodiscard]] CombineInput combine_input(CombineScale scale = CombineScale::kNone) const {
    return call(1).combine_input(scale);
  }
  // Outputs that nobody may have written when the call is refused.
  RankCall scratch;

 private:
  [[nodiscard]] const RankRouting& data() const { return good.routing[static_cast<size_t>(rank)]; }
  [[nodiscard]] const RankCall& call(size_t i) const {
    return good.calls[i][static_cast<size_t>(rank)];
  }
};

using RefusalCall = std::function<void(RefusalRank&)>;

// The texts of what `call` throws, by rank; then a good plan, dispatch and combine on the same
// exchange, which must succeed. Also sees to it that no output was written.
[[nodiscard]] std::vector<std::string> refused_texts(const RefusalCall& call);

// Rank 1 alone gets `reason`, every other rank that rank 1 refused for it.
void expect_refusal_of_rank_1(
    const std::string& operation, const std::string& reason, const RefusalCall& call
);

}  // namespace weft::test
