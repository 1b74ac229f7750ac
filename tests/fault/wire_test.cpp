// SPDX-License-Identifier: Apache-2.0
// A wire that loses or refuses what it is given: every rank learns of it in bounded time, by an
// error that says what was missing, and is told the same again by every later call.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "support/errors.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

ExchangeSetup world(const std::string& transport) {
  ExchangeSetup setup;
  setup.transport = transport;
  setup.timeout = std::chrono::milliseconds(300);
  return setup;
}

// Returns what ends each rank's exchange when all ranks repeat this case.
std::vector<Thrown> causes(const ExchangeSetup& setup, const std::string& calls) {
  Case spec;
  spec.num_tokens = {64, 60};
  spec.calls = calls;
  spec.output = OutputMemory::kStaged;
  const CaseData data = make_case_data(setup, spec);
  std::vector<Thrown> all(2);
  std::atomic<int> num_ended = 0;
  run_threads(2, [&](const Group& group) {
    Exchange exchange(group, setup.config());
    const auto forever = [&] {
      for (;;) {
        EXPECT_EQ(run_cases(exchange, {&data, 1}), "");
      }
    };
    const auto cause = thrown_by(forever);
    all[static_cast<size_t>(group.rank())] = *cause;
    const auto again = thrown_by([&] {
      static_cast<void>(exchange.plan(data.routing[0].routing(), data.routing[0].options));
    });
    EXPECT_EQ(text_of(again), cause->text);
    EXPECT_EQ(again->code, cause->code);
    // Until both are here nobody leaves, so that nobody takes leaving for the cause.
    ++num_ended;
    while (num_ended < 2) {
      std::this_thread::yield();
    }
  });
  return all;
}

TEST(LossyWireTest, ReportsACallWordThatNeverCame) {
  const std::vector<Thrown> all = causes(world("faulty:loopback?drop=1"), "dc");
  EXPECT_EQ(
      all[0].text,
      "plan: no handshake for 0.3 s from rank 1 (signal 3 at 0 of 1) (call 1). Is the peer alive "
      "and in the same call? [rank 0/2, faulty:loopback]"
  );
  EXPECT_EQ(
      all[1].text,
      "plan: no handshake for 0.3 s from rank 0 (signal 2 at 0 of 1) (call 1). Is the peer alive "
      "and in the same call? [rank 1/2, faulty:loopback]"
  );
  for (const Thrown& thrown : all) {
    EXPECT_TRUE(thrown.is_timeout);
  }
}

// Expects an error that starts with `begin` for one of 8 seeds: the seed decides which put is lost
// first, and most are of the kind that is looked for.
void expect_loss_is_reported(
    const std::string& options, const std::string& calls, const std::string& begin
) {
  std::string seen;
  for (int seed = 1; seed <= 8; ++seed) {
    for (const Thrown& thrown :
         causes(world(fmt::format("faulty:{}&seed={}", options, seed)), calls)) {
      EXPECT_TRUE(thrown.is_timeout) << thrown.text;
      if (thrown.text.starts_with(begin)) {
        return;
      }
      seen += thrown.text + "\n";
    }
  }
  ADD_FAILURE() << "nobody said: " << begin << "\n" << seen;
}

TEST(LossyWireTest, ReportsRowsThatNeverCame) {
  expect_loss_is_reported("shm?drop=0.02", "d", "dispatch: no rows for 0.3 s from rank ");
}

TEST(LossyWireTest, ReportsPartialSumsThatNeverCame) {
  expect_loss_is_reported(
      "loopback?drop=0.02&hide_mapped=1", "c", "combine: no partial sums for 0.3 s from rank "
  );
}

TEST(FailingWireTest, ReportsAPutThatFailed) {
  const std::vector<Thrown> all = causes(world("faulty:loopback?fail=1"), "dc");
  for (int rank = 0; rank < 2; ++rank) {
    const Thrown& thrown = all[static_cast<size_t>(rank)];
    EXPECT_EQ(thrown.code, ErrorCode::kTransport);
    EXPECT_EQ(
        thrown.text,
        "put: to rank " + std::to_string(1 - rank) + " failed (on purpose) [rank " +
            std::to_string(rank) + "/2, faulty:loopback]"
    );
  }
}

TEST(FailingWireTest, EndsTheOthersInBoundedTimeWhenOneRankFailsInsideACall) {
  for (const int num_threads : {1, 2}) {
    ExchangeSetup setup = world("faulty:shm?seed=6&fail=0.05");
    setup.num_threads = num_threads;
    const std::vector<Thrown> all = causes(setup, "dc");
    const bool has_failed =
        all[0].code == ErrorCode::kTransport || all[1].code == ErrorCode::kTransport;
    EXPECT_TRUE(has_failed) << all[0].text << "\n" << all[1].text;
  }
}

TEST(WireTest, LeavesTheProcessAbleToStartAfresh) {
  static_cast<void>(causes(world("faulty:shm?drop=1"), "dc"));
  Case spec;
  spec.num_tokens = {30, 40};
  ExchangeSetup setup;
  setup.transport = "shm";
  EXPECT_EQ(run_on_threads(setup, spec), "");
}

}  // namespace
}  // namespace weft::test
