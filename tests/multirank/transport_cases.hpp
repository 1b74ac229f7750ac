// SPDX-License-Identifier: Apache-2.0
// Cases that run over every transport, placement of ranks in domains and fan-out.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <tuple>
#include <vector>

#include "multirank/worlds.hpp"
#include "support/run_case.hpp"

namespace weft::test {

// A transport, the domain of each rank, and who fans rows out. A suite sets the sizes that are its
// own.
class TransportCasesTest
    : public testing::TestWithParam<std::tuple<std::string, std::vector<int>, FanOut>> {
 protected:
  TransportCasesTest() {
    const auto& [transport, domain_of, fan_out] = GetParam();
    setup_.domain_of = domain_of;
    setup_.num_ranks = static_cast<int>(domain_of.size());
    setup_.num_experts = 3 * setup_.num_ranks;
    setup_.max_topk = 6;
    setup_.transport = transport;
    setup_.fan_out = fan_out;
  }
  void SetUp() override {
    if (const std::string reason = obstacle(setup_.transport); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }

  ExchangeSetup setup_;
};

inline std::string test_name(const testing::TestParamInfo<TransportCasesTest::ParamType>& info) {
  const auto& [transport, domain_of, fan_out] = info.param;
  std::string name = fmt::format(
      "{}_{}_{}",
      transport,
      fmt::join(domain_of, ""),
      fan_out == FanOut::kSource ? "source" : "receiver"
  );
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_'
  );
  return name;
}

}  // namespace weft::test
