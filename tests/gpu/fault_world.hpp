// SPDX-License-Identifier: Apache-2.0
// Runs one call that must fail on every rank of three, and shows that the exchange works
// afterwards.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gpu/gpu_test.hpp"
#include "support/case_memory.hpp"
#include "support/errors.hpp"
#include "support/run_case.hpp"

namespace weft::test {

struct FaultWorld {
  explicit FaultWorld(int num_gpus, std::vector<int> domain_of = {});
  ExchangeSetup setup;
  CaseData good;  // calls: a dispatch, then a combine
};

// Exchange, memory and arguments for the calls of one rank, which a test may spoil.
struct FaultRank {
  FaultRank(Exchange& used, const CaseData& data);
  void make_plan() { plan.emplace(exchange.plan(routing, options)); }
  // Once there is a plan, whose number of rows it takes for a budget.
  void plan_and_dispatch(const CallOptions& call = {});
  // Makes the first launch of plan_and_dispatch(), split-phase; receive() makes the second.
  void send();
  void receive() { exchange.receive(*plan); }
  // Another content of topk_idx.
  void set_index(int64_t token, int64_t k, int64_t value);

  Exchange& exchange;
  const Group* group = nullptr;  // in a FaultCall
  int rank;
  CaseMemory memory;
  const CaseMemory::Placed* idx = nullptr;
  const CaseMemory::Placed* rows = nullptr;  // of the dispatch
  const CaseMemory::Placed* row_weights = nullptr;
  Routing routing;
  PlanOptions options;
  std::optional<Plan> plan;
  DispatchInput dispatch_in;
  DispatchOutput dispatch_out;
  CombineInput combine_in;
  CombineOutput combine_out;
};

using FaultCall = std::function<void(FaultRank&)>;

// After a good plan: the texts of what `call` throws, by rank; then a good plan, dispatch and
// combine on the same exchange, which must succeed.
// `domain_of` [3]: in several domains.
[[nodiscard]] std::vector<std::string> fault_texts(
    int num_gpus, const FaultCall& call, const std::vector<int>& domain_of = {}
);

// Rank 2 differs from 0 and 1 in a field: all name it, both values and the other rank.
void expect_disagreement(
    int num_gpus,
    const std::string& field,
    const std::pair<std::string, std::string>& values,
    const FaultCall& call
);

// Rank 1 alone gets `reason`, the others that rank 1 refused the call, and why if its host knew.
void expect_refusal(
    int num_gpus,
    const std::string& op,
    const std::string& reason,
    const FaultCall& call,
    bool is_known_to_host = true
);

// Like expect_refusal(), for a call that plans: rank 1 has an index below and above the range.
void expect_bad_index_is_refused(int num_gpus, const FaultCall& call);

// Rank 2 does not make the last call that the others make.
void expect_timeout(
    int num_gpus,
    const std::string& op,
    uint32_t number,
    const FaultCall& before,
    const FaultCall& call
);

}  // namespace weft::test
