// SPDX-License-Identifier: Apache-2.0
// Calls whose numbers and signals pass 2^31 and 2^32, as after weeks of work, bit for bit.
#include <gtest/gtest.h>

#include "cpu/exchange.hpp"
#include "support/run_case.hpp"

namespace weft {

struct CpuInside {
  CpuExchange& exchange;

  // Collective. Sets all signals as if `num_calls` (an even number) had been made, each of which
  // raised every signal.
  void begin_after(uint64_t num_calls, const Group& group) const {
    const SignalMap& map = exchange.signals_;
    const int next = (group.rank() + 1) % group.num_ranks();
    for (uint32_t signal = 0; signal < map.size(); ++signal) {
      if (signal >= map.interrupted(0) && signal < map.dispatch(0, 0)) {
        continue;
      }
      const bool is_handshake = signal < map.records(0);  // one for each parity
      const uint64_t raised = is_handshake ? num_calls / 2 : num_calls;
      exchange.transport_->raise(next, signal, raised);
      exchange.settled_[signal] = raised;
    }
    exchange.board_->call_ = num_calls;
    group.barrier();
  }
};

namespace test {
namespace {

class EpochTest : public testing::TestWithParam<std::pair<const char*, uint64_t>> {};

TEST_P(EpochTest, GoesOnAcrossTheEndOfANumber) {
  const auto& [transport, end] = GetParam();
  ExchangeSetup setup;
  setup.num_ranks = 3;
  setup.num_experts = 6;
  setup.max_tokens = 80;
  setup.transport = transport;
  std::vector<CaseData> cases;
  for (int i = 0; i < 6; ++i) {
    Case spec;
    spec.num_tokens = {20 + i, 80, 7};
    spec.scale_cols = i % 2 == 0 ? 4 : 0;
    cases.push_back(make_case_data(setup, spec));
  }
  run_threads(3, [&, end = end](const Group& group) {
    Exchange exchange(group, setup.config());
    CpuInside{dynamic_cast<CpuExchange&>(Executor::of(exchange))}.begin_after(end - 8, group);
    EXPECT_EQ(run_cases(exchange, cases), "");  // three calls or more of each
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    EpochTest,
    testing::Values(
        std::pair("loopback", uint64_t{1} << 31),
        std::pair("loopback", uint64_t{1} << 32),
        std::pair("shm", uint64_t{1} << 31),
        std::pair("shm", uint64_t{1} << 32),
        std::pair("loopback", uint64_t{1} << 33)  // handshakes of each parity pass 2^32
    )
);

}  // namespace
}  // namespace test
}  // namespace weft
