// SPDX-License-Identifier: Apache-2.0
// Helpers that tests of PeerLoss::kShrink share.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "support/run_case.hpp"
#include "survivors/survivors.hpp"

namespace weft::test {

inline constexpr int kNumRounds = 4;  // each of three calls

inline ExchangeSetup setup_of(int num_ranks, const char* transport) {
  ExchangeSetup setup;
  setup.num_ranks = num_ranks;
  setup.num_experts = 2 * num_ranks;
  setup.transport = transport;
  setup.num_threads = 2;
  setup.max_tokens = 70;
  return setup;
}

inline Exchange shrinking(
    const Group& group,
    const ExchangeSetup& setup,
    const std::function<void(const CallReport&)>& on_loss = {}
) {
  ExchangeConfig config = setup.config();
  config.on_peer_loss = PeerLoss::kShrink;
  config.on_loss = on_loss;
  return make_exchange(group, setup, config);
}

// Cases that take different ways through the executor.
inline std::vector<Case> cases() {
  std::vector<Case> cases(4);
  cases[0].topk = 4;
  cases[1].layout = Layout::kRankMajor;
  cases[1].output = OutputMemory::kStaged;
  cases[2].layout = Layout::kExpertStrided;
  cases[2].hole_fraction = 0.2;
  cases[3].order = SumOrder::kTopk;
  cases[3].pad_multiple = 8;
  return cases;
}

inline int verdict(const std::string& problem) {
  if (!problem.empty()) {
    std::cerr << problem << std::endl;
  }
  return problem.empty() ? 0 : 1;
}

inline std::string text(const std::vector<int>& ranks) {
  return fmt::format("{}", fmt::join(ranks, ","));
}

}  // namespace weft::test
