// SPDX-License-Identifier: Apache-2.0
// Rounds of plan, dispatch and combine during which ranks may be lost, and what they must come to
// by the reference, which knows nothing of survival: ranks that are lost before the plan have no
// tokens and no routes go to them, but to replicas on ranks alive where there are some; rows of
// ranks lost before dispatch are zeros; rows on ranks lost before combine are -0, which changes no
// sum.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "support/exchange_case.hpp"
#include "support/memory.hpp"
#include "weft/exchange.hpp"

namespace weft::test {

// Ranks that were alive when each call of a round ended.
struct RoundReport {
  std::vector<int> plan;
  std::vector<int> dispatch;
  std::vector<int> combine;
};

class SurvivorRounds {
 public:
  SurvivorRounds(const ExchangeSetup& setup, const Case& spec) : setup_(setup), spec_(spec) {}

  // Results of a round's calls on this rank.
  struct Round {
    uint64_t seed = 0;
    RoundReport alive;
    std::optional<Plan> plan;
    Buffer buffer;
    Matrix rows;  // if not in `buffer`
    Matrix weights;
    Matrix count_sums;  // not with kRankMajor
    Matrix x;
    std::vector<int> lost_experts;  // by the report of combine
  };

  // The calls of one round, numbered by its seed, of this rank. `at(call)` is called before each,
  // counted from 0, and with 3 when the last has returned.
  [[nodiscard]] Round call(
      Exchange& exchange, uint64_t seed, const std::function<void(int call)>& at = [](int) {}
  ) const;
  // Returns what differs from the reference; empty if all is right.
  [[nodiscard]] std::string problem_of(const Round& round, int rank) const;
  // Makes a round and returns its problem_of().
  [[nodiscard]] std::string run(
      Exchange& exchange, uint64_t seed, const std::function<void(int call)>& at = [](int) {}
  ) const;

 private:
  struct Inputs;
  struct Outputs;
  [[nodiscard]] Inputs inputs(uint64_t seed) const;
  [[nodiscard]] std::vector<Plan> plans(const Inputs& in, const RoundReport& alive) const;
  [[nodiscard]] Outputs expected(
      const std::vector<Plan>& plans, Inputs in, const RoundReport& alive, size_t rank
  ) const;
  [[nodiscard]] PlanOptions options() const;
  // Returns whether one of these ranks has the expert, or a replica by the case's placement.
  [[nodiscard]] bool has_copy(int32_t expert, const std::vector<int>& alive) const;

  ExchangeSetup setup_;
  Case spec_;
};

}  // namespace weft::test
