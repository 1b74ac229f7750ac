// SPDX-License-Identifier: Apache-2.0
// Rows that go by way of a forwarder: what is lost there, and a rank that dies, is named by those
// who wait behind it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "support/errors.hpp"
#include "support/killed_rank.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

ExchangeSetup two_domains(const std::string& transport) {
  ExchangeSetup setup;
  setup.num_ranks = 4;
  setup.num_experts = 8;
  setup.domain_of = {0, 0, 1, 1};
  setup.transport = transport;
  return setup;
}

CaseData staged_case(const ExchangeSetup& setup, const std::string& calls) {
  Case spec;
  spec.num_tokens = {64, 60, 33, 50};
  spec.topk = 4;
  spec.calls = calls;
  spec.output = OutputMemory::kStaged;
  return make_case_data(setup, spec);
}

// Returns what ends each rank's exchange when all ranks repeat this case.
std::vector<Thrown> causes(const ExchangeSetup& setup, const std::string& calls) {
  const CaseData data = staged_case(setup, calls);
  std::vector<Thrown> all(4);
  std::atomic<int> num_ended = 0;
  run_threads(4, [&](const Group& group) {
    Exchange exchange = make_exchange(group, setup);
    const auto forever = [&] {
      for (;;) {
        EXPECT_EQ(run_cases(exchange, {&data, 1}), "");
      }
    };
    all[static_cast<size_t>(group.rank())] = *thrown_by(forever);
    // Until all are here nobody leaves, so that nobody takes leaving for the cause.
    ++num_ended;
    while (num_ended < 4) {
      std::this_thread::yield();
    }
  });
  return all;
}

// Expects an error with `part` for one of 12 seeds: the seed decides which put is lost first.
void expect_loss_is_reported(const std::string& calls, const std::string& part) {
  std::string seen;
  for (int seed = 1; seed <= 12; ++seed) {
    ExchangeSetup setup =
        two_domains(fmt::format("faulty:loopback?drop=0.01&hide_mapped=1&seed={}", seed));
    setup.timeout = std::chrono::milliseconds(300);
    for (const Thrown& thrown : causes(setup, calls)) {
      EXPECT_TRUE(thrown.is_timeout) << thrown.text;
      if (thrown.text.find(part) != std::string::npos) {
        return;
      }
      seen += thrown.text + "\n";
    }
  }
  ADD_FAILURE() << "nobody said: " << part << "\n" << seen;
}

TEST(LostByForwarderTest, ReportsRowsThatWereNotHandedOn) {
  expect_loss_is_reported("d", "dispatch: no rows for 0.3 s from rank 0 by way of rank 2 ");
}

TEST(LostByForwarderTest, ReportsSumsThatDidNotComeBack) {
  expect_loss_is_reported("c", "combine: no partial sums for 0.3 s from rank 2 ");
}

// Rank 2 carries the tokens of rank 0 and is behind rank 3 for rank 1's.
TEST(ForwarderDeathTest, ARankKilledAnywhereEndsTheOthersInTime) {
  ExchangeSetup setup = two_domains("shm");
  setup.num_threads = 2;
  const CaseData data = staged_case(setup, "dc");
  for (int delay_us = 300; delay_us < 25'000; delay_us *= 3) {
    const auto statuses = run_until_killed(data, 2, std::chrono::microseconds(delay_us));
    EXPECT_EQ(statuses, (std::vector<int>{0, 0, 128 + SIGKILL, 0}))
        << "after " << delay_us << " us";
  }
}

// A rank that refuses its caller makes all ranks throw, and the exchange stays usable.
TEST(DomainsRefusalTest, LeavesTheExchangeUsable) {
  const ExchangeSetup setup = two_domains("loopback");
  const CaseData data = staged_case(setup, "dc");
  run_threads(4, [&](const Group& group) {
    const auto rank = static_cast<size_t>(group.rank());
    Exchange exchange = make_exchange(group, setup);
    const RankRouting& routing = data.routing[rank];
    const Plan plan = exchange.plan(routing.routing(), routing.options);
    RankCall call = data.calls[0][rank];
    const auto thrown = thrown_by([&] {
      DispatchInput in = call.dispatch_input();
      in.x.rows += group.rank() == 3 ? 1 : 0;
      exchange.dispatch(plan, in, call.dispatch_output());
    });
    EXPECT_TRUE(thrown && thrown->code == ErrorCode::kInvalidArgument) << text_of(thrown);
    EXPECT_EQ(run_cases(exchange, {&data, 1}), "");
  });
}

}  // namespace
}  // namespace weft::test
