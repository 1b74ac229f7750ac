// SPDX-License-Identifier: Apache-2.0
// Rounds of plan, dispatch and combine during which ranks may be lost, and what they must come to
// by the reference, which knows nothing of survival: ranks that are lost before the plan have no
// tokens and no routes go to them; rows of ranks lost before dispatch are zeros; rows on ranks lost
// before combine are -0, which changes no sum.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "support/exchange_case.hpp"
#include "support/memory.hpp"
#include "weft/exchange.hpp"

namespace weft::test {

// Who was alive when each call of a round ended.
struct RoundReport {
  std::vector<int> plan;
  std::vector<int> dispatch;
  std::vector<int> combine;
};

class SurvivorRounds {
 public:
  SurvivorRounds(const ExchangeSetup& setup, const Case& spec) : setup_(setup), spec_(spec) {}

  // One round of this rank, numbered by its seed. `before(call)` is called before each call of the
  // round, counted from 0. Returns what differs from the reference, nothing if all is right.
  [[nodiscard]] std::string run(
      Exchange& exchange, uint64_t seed, const std::function<void(int call)>& before = [](int) {}
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

  ExchangeSetup setup_;
  Case spec_;
};

}  // namespace weft::test
