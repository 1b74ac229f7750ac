// SPDX-License-Identifier: Apache-2.0
// A call on GPUs that the user of one rank interrupts: its kernel ends, and every rank throws and
// names that rank.
#include <gtest/gtest.h>

#include "core/interrupt.hpp"
#include "gpu/fault_world.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

class GpuInterruptTest : public GpuTest {
 protected:
  // Rank 1 makes the second call alone and is interrupted; then the others make it. It succeeds
  // where rank 1 had given all of its part, and then the third fails.
  static void expect_told(const std::string& op, const FaultCall& call) {
    FaultWorld world(num_gpus());
    world.setup.timeout = 60s;
    const auto begin = std::chrono::steady_clock::now();
    run_threads(3, [&](const Group& group) {
      Exchange exchange = make_exchange(group, world.setup);
      FaultRank own(exchange, world.good);
      own.make_plan();
      const auto attempt = [&] { return thrown_by([&] { call(own); }); };
      const std::string place = fmt::format(" [rank {}/3, peer]", own.rank);
      std::string expected = op + ": interrupted while it waited for the GPU (call 2)" + place;
      if (own.rank == 1) {
        const InterruptScope scope([] { return true; });
        const auto thrown = attempt();
        EXPECT_EQ(text_of(thrown), expected);
        EXPECT_EQ(thrown.value_or(Thrown{}).code, ErrorCode::kInterrupted);
      }
      group.barrier();
      auto thrown = attempt();
      const int number = thrown ? 2 : 3;
      thrown = thrown ? thrown : attempt();
      if (own.rank != 1) {
        const std::string told = "rank 1 was interrupted in call 2 (this is call {})";
        expected = op + ": " + fmt::format(fmt::runtime(told), number) + place;
      }
      EXPECT_EQ(text_of(thrown), expected);
      EXPECT_EQ(text_of(attempt()), expected) << "for good";
      EXPECT_EQ(thrown.value_or(Thrown{}).is_peer_error, own.rank != 1);
      group.barrier();
    });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s) << "nobody waits for a deadline";
  }
};

TEST_F(GpuInterruptTest, EndsAPlan) {
  expect_told("plan", [](FaultRank& own) { own.make_plan(); });
}

TEST_F(GpuInterruptTest, EndsADispatch) {
  expect_told("dispatch", [](FaultRank& own) {
    own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
  });
}

}  // namespace
}  // namespace weft::test
