// SPDX-License-Identifier: Apache-2.0
// A call that the user of one rank interrupts: every rank throws and names that rank, and no later
// call takes its place.
#include "core/interrupt.hpp"

#include <gtest/gtest.h>

#include <array>

#include "refusal.hpp"
#include "transport/transport.hpp"

namespace weft::test {
namespace {

std::string text_of_rank(const std::string& text, int rank) {
  return fmt::format("{} [rank {}/3, ", text, rank);
}

class InterruptTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string reason = transport_obstacle(GetParam(), Group::local(1).front());
    if (!reason.empty()) {
      GTEST_SKIP() << reason;
    }
    world_.setup.transport = GetParam();
  }
  static void expect_begin(const std::optional<Thrown>& thrown, const std::string& begin) {
    EXPECT_TRUE(text_of(thrown).starts_with(begin)) << text_of(thrown) << "\ninstead of " << begin;
  }

  RefusalWorld world_;
};

// Rank 1 calls first and is interrupted; the others make the same call only then, as their
// handshakes with rank 1 would allow.
TEST_P(InterruptTest, IsToldToRanksThatCallAfterwards) {
  run_threads(3, [&](const Group& group) {
    const int rank = group.rank();
    Exchange exchange(group, world_.setup.config());
    const RankRouting& routing = world_.good.routing[static_cast<size_t>(rank)];
    const RankCall& call = world_.good.calls[0][static_cast<size_t>(rank)];
    const Plan plan = exchange.plan(routing.routing(), routing.options);
    const auto dispatch = [&] {
      exchange.dispatch(plan, call.dispatch_input(), RankCall(call).dispatch_output());
    };
    const std::string own =
        text_of_rank("dispatch: interrupted while it waited for handshake (call 2)", 1);
    if (rank == 1) {
      const InterruptScope scope([] { return true; });
      const auto thrown = thrown_by(dispatch);
      expect_begin(thrown, own);
      EXPECT_EQ(thrown->code, ErrorCode::kInterrupted);
    }
    group.barrier();
    for (int attempt = 0; attempt < 2; ++attempt) {
      const auto thrown = thrown_by(dispatch);
      const std::string told = "dispatch: rank 1 was interrupted in call 2 (this is call 2)";
      expect_begin(thrown, rank == 1 ? own : text_of_rank(told, rank));
      EXPECT_EQ(thrown->is_peer_error, rank != 1);
    }
    group.barrier();
  });
}

// The others wait in their call when it happens.
TEST_P(InterruptTest, IsToldToRanksThatWait) {
  run_threads(3, [&](const Group& group) {
    const int rank = group.rank();
    Exchange exchange(group, world_.setup.config());
    const RankRouting& routing = world_.good.routing[static_cast<size_t>(rank)];
    const auto plan = [&] { return exchange.plan(routing.routing(), routing.options); };
    if (rank == 1) {
      const InterruptScope scope([] { return true; });
      EXPECT_EQ(thrown_by([&] { static_cast<void>(plan()); })->code, ErrorCode::kInterrupted);
      group.barrier();
      return;
    }
    if (rank == 0) {  // rank 2 never makes the call that rank 0 waits in
      expect_begin(
          thrown_by([&] { static_cast<void>(plan()); }),
          text_of_rank("plan: rank 1 was interrupted in call 1 (this is call 1)", 0)
      );
    }
    group.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    InterruptTest,
    testing::Values("loopback", "shm", "ofi:tcp", "faulty:loopback?seed=1&delay=0.3"),
    [](const auto& param) {
      const std::string name = param.param;
      return name.starts_with("faulty") ? "faulty" : name.substr(0, name.find(':'));
    }
);

}  // namespace
}  // namespace weft::test
