// SPDX-License-Identifier: Apache-2.0
#include "cpu/protocol/waiter.hpp"

#include <gtest/gtest.h>

#include <thread>

#include "core/interrupt.hpp"
#include "fake_transport.hpp"
#include "support/errors.hpp"

namespace weft::test {
namespace {

using std::chrono::milliseconds;

class WaiterTest : public testing::Test {
 protected:
  Waiter waiter(milliseconds timeout) {
    return {transport_, {.rank = 0, .num_ranks = 4, .transport = "fake"}, timeout, kFirstNotice};
  }
  static constexpr uint32_t kFirstNotice = 8;
  static constexpr WaitReason kReason = {.op = "dispatch", .call = 7, .what = "rows"};
  FakeTransport transport_;
};

TEST_F(WaiterTest, ReturnsAtOnceWhenAllSignalsAreRaised) {
  transport_.signals[3] = 5;
  Waiter wait = waiter(milliseconds(1));
  wait.until_raised(kReason, {{.peer = 1, .signal = 3, .wanted = 5}});
  wait.until_raised(kReason, {});
  EXPECT_EQ(wait.wait_seconds(), (std::vector<double>{0, 0, 0, 0}));
}

TEST_F(WaiterTest, ReturnsWhenTheLastSignalArrives) {
  transport_.on_park = [this] { ++transport_.signals[2]; };
  waiter(std::chrono::seconds(60)).until_raised(kReason, {{.peer = 2, .signal = 2, .wanted = 2}});
  EXPECT_EQ(transport_.signals[2], 2U);
}

TEST_F(WaiterTest, NamesEachMissingPeerWhenTimeIsUp) {
  transport_.signals[1] = 4;
  transport_.signals[2] = 1;
  const auto thrown = thrown_by([&] {
    waiter(milliseconds(100))
        .until_raised(
            kReason,
            {{.peer = 1, .signal = 1, .wanted = 4},
             {.peer = 2, .signal = 2, .wanted = 3},
             {.peer = 3, .signal = 3, .wanted = 1}}
        );
  });
  EXPECT_EQ(
      text_of(thrown),
      "dispatch: no rows for 0.1 s from rank 2 (signal 2 at 1 of 3), rank 3 (signal 3 at 0 of 1) "
      "(call 7). Is the peer alive and in the same call? [rank 0/4, fake]"
  );
  EXPECT_TRUE(thrown->is_timeout);
  EXPECT_EQ(thrown->code, ErrorCode::kTimeout);
}

TEST_F(WaiterTest, NamesAPeerThatDied) {
  transport_.peers[2] = PeerState::kDied;
  transport_.peers[3] = PeerState::kDied;  // of whom nothing is wanted
  const auto thrown = thrown_by([&] {
    waiter(std::chrono::seconds(60)).until_raised(kReason, {{.peer = 2, .signal = 5, .wanted = 9}});
  });
  EXPECT_EQ(
      text_of(thrown),
      "dispatch: rank 2 died before its rows arrived (call 7, signal 5 at 0 of 9) [rank 0/4, fake]"
  );
  EXPECT_TRUE(thrown->is_peer_error);
}

TEST_F(WaiterTest, NamesAPeerThatLeft) {
  transport_.peers[1] = PeerState::kLeft;
  const auto thrown = thrown_by([&] {
    waiter(std::chrono::seconds(60)).until_raised(kReason, {{.peer = 1, .signal = 0, .wanted = 1}});
  });
  EXPECT_EQ(
      text_of(thrown),
      "dispatch: rank 1 left the exchange before its rows arrived (call 7, signal 0 at 0 of 1) "
      "[rank 0/4, fake]"
  );
}

TEST_F(WaiterTest, NamesThePeerThatDiedRatherThanOneThatLeftForIt) {
  transport_.peers[1] = PeerState::kLeft;
  transport_.peers[2] = PeerState::kDied;
  transport_.peers[3] = PeerState::kLeft;
  const auto thrown = thrown_by([&] {
    waiter(std::chrono::seconds(60))
        .until_raised(
            kReason,
            {{.peer = 1, .signal = 1, .wanted = 1},
             {.peer = 2, .signal = 2, .wanted = 1},
             {.peer = 3, .signal = 3, .wanted = 1}}
        );
  });
  EXPECT_TRUE(text_of(thrown).starts_with("dispatch: rank 2 died before")) << text_of(thrown);
}

TEST_F(WaiterTest, TellsHowAPeerEndedAndWhoDied) {
  const Waiter one = waiter(std::chrono::seconds(60));
  transport_.peers[3] = PeerState::kLeft;
  EXPECT_EQ(one.end_of(3), "rank 3 left the exchange");
  EXPECT_EQ(one.end_of(1), "");
  EXPECT_EQ(one.end_of(-1), "");
  transport_.peers[2] = PeerState::kDied;
  EXPECT_EQ(one.end_of(3), "rank 2 died and rank 3 left the exchange");
  EXPECT_EQ(one.end_of(1), "rank 2 died");
  EXPECT_EQ(one.end_of(-1), "rank 2 died");
  transport_.peers[3] = PeerState::kDied;
  EXPECT_EQ(one.end_of(3), "rank 3 died");
}

TEST_F(WaiterTest, CountsWhatAPeerRaisedBeforeItEnded) {
  transport_.on_park = [this] {
    transport_.signals[1] = 1;
    transport_.peers[1] = PeerState::kDied;
  };
  const auto thrown = thrown_by([&] {
    waiter(std::chrono::seconds(60)).until_raised(kReason, {{.peer = 1, .signal = 1, .wanted = 1}});
  });
  EXPECT_EQ(text_of(thrown), "nothing");
}

TEST_F(WaiterTest, BlamesNoPeerThatRaisedItsSignalAndLeftWhileAnotherIsLate) {
  int num_parks = 0;
  transport_.on_park = [&] {
    transport_.signals[1] = 1;
    transport_.peers[1] = PeerState::kLeft;
    transport_.signals[2] = ++num_parks == 3 ? 1 : 0;
  };
  const auto thrown = thrown_by([&] {
    waiter(std::chrono::seconds(60))
        .until_raised(
            kReason, {{.peer = 1, .signal = 1, .wanted = 1}, {.peer = 2, .signal = 2, .wanted = 1}}
        );
  });
  EXPECT_EQ(text_of(thrown), "nothing");
}

// Signals of others wake it all the time.
TEST_F(WaiterTest, NamesAPeerThatDiedThoughItNeverSleepsForLong) {
  transport_.longest_park = milliseconds(1);
  transport_.peers[2] = PeerState::kDied;
  const auto thrown = thrown_by([&] {
    waiter(std::chrono::seconds(10)).until_raised(kReason, {{.peer = 2, .signal = 5, .wanted = 9}});
  });
  EXPECT_TRUE(text_of(thrown).starts_with("dispatch: rank 2 died before")) << text_of(thrown);
}

TEST_F(WaiterTest, AsksTheCheckOfItsCaller) {
  const auto wait = [&] {
    waiter(milliseconds(200)).until_raised(kReason, {{.peer = 2, .signal = 5, .wanted = 9}});
  };
  {
    const InterruptScope scope([] { return true; });
    const auto thrown = thrown_by(wait);
    EXPECT_EQ(
        text_of(thrown), "dispatch: interrupted while it waited for rows (call 7) [rank 0/4, fake]"
    );
    EXPECT_EQ(thrown->code, ErrorCode::kInterrupted);
    const InterruptScope inner([] { return false; });
    EXPECT_TRUE(thrown_by(wait)->is_timeout);
    std::thread([&] { EXPECT_TRUE(thrown_by(wait)->is_timeout) << "the check is not its own"; }
    ).join();
  }
  EXPECT_TRUE(thrown_by(wait)->is_timeout) << "the check is no longer in force";
}

TEST_F(WaiterTest, NamesARankThatWasInterruptedInThisCallOrBefore) {
  transport_.signals[kFirstNotice + 3] = 8;
  const std::vector<Missing> missing = {{.peer = 2, .signal = 5, .wanted = 1}};
  EXPECT_TRUE(
      thrown_by([&] { waiter(milliseconds(100)).until_raised(kReason, missing); })->is_timeout
  ) << "it still gave what this call needs";
  const WaitReason next = {.op = "combine", .call = 8, .what = "handshake"};
  const auto thrown =
      thrown_by([&] { waiter(std::chrono::seconds(60)).until_raised(next, missing); });
  EXPECT_EQ(
      text_of(thrown), "combine: rank 3 was interrupted in call 8 (this is call 8) [rank 0/4, fake]"
  );
  EXPECT_TRUE(thrown->is_peer_error);
}

TEST_F(WaiterTest, EndsQuietlyWhenAnotherWorkerFailed) {
  const auto never = [] { return false; };
  const auto missing = [] { return std::vector<Missing>{{.peer = 1, .signal = 0, .wanted = 1}}; };
  const auto thrown = thrown_by([&] {
    waiter(std::chrono::seconds(60)).until(kReason, never, missing, [] { return true; });
  });
  EXPECT_EQ(text_of(thrown), "nothing");
}

TEST_F(WaiterTest, BooksTheTimeOnThePeersThatWereMissing) {
  transport_.on_park = [this] { transport_.signals[1] = 1; };
  Waiter wait = waiter(std::chrono::seconds(60));
  wait.until_raised(
      kReason, {{.peer = 1, .signal = 1, .wanted = 1}, {.peer = 2, .signal = 2, .wanted = 0}}
  );
  const std::vector<double> seconds = wait.wait_seconds();
  EXPECT_GT(seconds[1], 0);
  EXPECT_EQ(seconds[2], 0);
}

TEST_F(WaiterTest, NamesTheRankThatHandsOn) {
  const auto thrown = thrown_by([&] {
    waiter(milliseconds(100))
        .until_raised(kReason, {{.peer = 1, .signal = 1, .wanted = 4, .via = 3}});
  });
  EXPECT_EQ(
      text_of(thrown),
      "dispatch: no rows for 0.1 s from rank 1 by way of rank 3 (signal 1 at 0 of 4) (call 7). Is "
      "the peer alive and in the same call? [rank 0/4, fake]"
  );
}

TEST_F(WaiterTest, NamesARankThatEndedBeforeItHandedOn) {
  transport_.peers[3] = PeerState::kDied;
  const auto thrown = thrown_by([&] {
    waiter(std::chrono::seconds(60))
        .until_raised(kReason, {{.peer = 1, .signal = 1, .wanted = 4, .via = 3}});
  });
  EXPECT_EQ(
      text_of(thrown),
      "dispatch: rank 3 died before rank 1's rows arrived (call 7, signal 1 at 0 of 4) [rank 0/4, "
      "fake]"
  );
}

TEST_F(WaiterTest, NamesASourceThatDiedBehindTheRankThatHandsOn) {
  transport_.peers[1] = PeerState::kDied;
  const auto thrown = thrown_by([&] {
    waiter(std::chrono::seconds(60))
        .until_raised(kReason, {{.peer = 1, .signal = 1, .wanted = 4, .via = 3}});
  });
  EXPECT_EQ(
      text_of(thrown),
      "dispatch: rank 1 died before its rows arrived (call 7, signal 1 at 0 of 4) [rank 0/4, fake]"
  );
}

// It may have put its rows and ended while they are still handed on.
TEST_F(WaiterTest, WaitsForRowsOfASourceThatLeft) {
  transport_.peers[1] = PeerState::kLeft;
  int slices = 0;
  transport_.on_park = [&] { transport_.signals[1] = ++slices < 3 ? 0 : 4; };
  waiter(std::chrono::seconds(60))
      .until_raised(kReason, {{.peer = 1, .signal = 1, .wanted = 4, .via = 3}});
  EXPECT_EQ(slices, 3);
}

}  // namespace
}  // namespace weft::test
