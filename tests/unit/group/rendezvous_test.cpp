// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>

#include "group_test.hpp"
#include "tcp_ranks.hpp"

namespace weft {
namespace {

using namespace std::chrono_literals;

void expect_outcome(const Outcome& outcome, ErrorCode code, const std::string& text) {
  EXPECT_EQ(outcome.error.substr(0, text.size()), text);
  EXPECT_EQ(outcome.code, code) << outcome.error;
}

void expect_no_errors(const std::vector<Outcome>& outcomes) {
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.error, "");
  }
}

TEST(RendezvousTest, ConnectsAnyNumberOfRanks) {
  for (const int num_ranks : {1, 2, 3, 8}) {
    TestPort port;
    std::atomic<int> ranks = 0;
    const auto outcomes =
        run_connected(port, rendezvous_of_all(num_ranks, port.port), [&](Group& group) {
          EXPECT_EQ(group.num_ranks(), num_ranks);
          ranks |= 1 << group.rank();
          group.barrier();
        });
    expect_no_errors(outcomes);
    EXPECT_EQ(ranks, (1 << num_ranks) - 1);
  }
}

TEST(RendezvousTest, PublicConnectOpensThePortItself) {
  const int port = TestPort().port;
  std::jthread other([&] {
    const Group group = Group::connect(rendezvous_of(1, 2, port));
    expect_gathered(group, 3);
  });
  const Group group = Group::connect(rendezvous_of(0, 2, port));
  expect_gathered(group, 3);
}

TEST(RendezvousTest, AWrongSecretIsNamedOnEveryRank) {
  TestPort port;
  auto ranks = rendezvous_of_all(3, port.port, 1s);
  ranks[2].secret = "another secret, just as long";
  const std::string place = port.place();
  const auto outcomes = run_connected(port, ranks);
  const std::string missing = "connect: rank 2 did not join at " + place +
                              " within 1.0 s (a connection that calls itself rank 2 proved "
                              "another secret)";
  expect_outcome(outcomes[0], ErrorCode::kTimeout, missing + " [rank 0/3, tcp]");
  expect_outcome(outcomes[1], ErrorCode::kTimeout, missing + " [rank 1/3, tcp]");
  expect_outcome(
      outcomes[2],
      ErrorCode::kInvalidArgument,
      "connect: rank 0 at " + place + " holds another secret (it must be the same on every rank)"
  );
}

TEST(RendezvousTest, AWrongGroupSizeIsNamedOnEveryRank) {
  TestPort port;
  const auto outcomes = run_connected(
      port,
      {rendezvous_of(0, 2, port.port),
       rendezvous_of(1, 3, port.port),
       rendezvous_of(2, 3, port.port)}
  );
  for (const Outcome& outcome : outcomes) {
    EXPECT_TRUE(
        outcome.error.starts_with(
            "connect: group size differs: rank 1 has num_ranks = 3, rank 0 has num_ranks = 2 ["
        ) ||
        outcome.error.starts_with(
            "connect: group size differs: rank 2 has num_ranks = 3, rank 0 has num_ranks = 2 ["
        )
    ) << outcome.error;
    EXPECT_EQ(outcome.code, ErrorCode::kInvalidArgument);
  }
}

TEST(RendezvousTest, ADuplicateRankIsNamedOnEveryRank) {
  TestPort port;
  const std::string place = port.place();
  const auto outcomes = run_connected(
      port,
      {rendezvous_of(0, 4, port.port),
       rendezvous_of(1, 4, port.port),
       rendezvous_of(1, 4, port.port),
       rendezvous_of(2, 4, port.port)}
  );
  for (const Outcome& outcome : outcomes) {
    expect_outcome(
        outcome, ErrorCode::kInvalidArgument, "connect: rank 1 joined twice at " + place
    );
  }
}

TEST(RendezvousTest, MissingRanksAreNamedWithTheAddress) {
  TestPort port;
  const std::string place = port.place();
  const auto outcomes =
      run_connected(port, {rendezvous_of(0, 4, port.port, 1s), rendezvous_of(2, 4, port.port, 1s)});
  const std::string text = "connect: ranks 1 and 3 did not join at " + place + " within 1.0 s";
  expect_outcome(outcomes[0], ErrorCode::kTimeout, text + " [rank 0/4, tcp]");
  expect_outcome(outcomes[1], ErrorCode::kTimeout, text + " [rank 2/4, tcp]");
}

TEST(RendezvousTest, OfManyMissingRanksSomeAreNamed) {
  TestPort port;
  const auto outcomes = run_connected(port, {rendezvous_of(0, 1000, port.port, 100ms)});
  const std::string text =
      "connect: ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 983 more did not "
      "join at ";
  expect_outcome(outcomes[0], ErrorCode::kTimeout, text);
}

TEST(RendezvousTest, AMissingRankZeroIsNamedWithTheAddress) {
  const int port = TestPort().port;  // closed again
  expect_error(
      ErrorCode::kTimeout,
      fmt::format(
          "connect: rank 0 did not answer at 127.0.0.1:{} within 0.2 s (Connection refused). Does "
          "it run, and is its group not complete already? [rank 1/2, tcp]",
          port
      ),
      [&] { static_cast<void>(Group::connect(rendezvous_of(1, 2, port, 200ms))); }
  );
}

TEST(RendezvousTest, ARankThatLeavesBeforeAllHaveComeIsNamed) {
  TestPort port;
  std::jthread quitter([place = port.port] {
    // It gives up after 250 ms, long before rank 0 does.
    EXPECT_THROW(static_cast<void>(join_ranks(rendezvous_of(1, 3, place, 200ms))), TimeoutError);
  });
  const auto outcomes = run_connected(port, {rendezvous_of(0, 3, port.port)});
  expect_outcome(
      outcomes[0], ErrorCode::kPeerFailed, "connect: rank 1 left before the group was complete"
  );
}

TEST(RendezvousTest, ATakenPortIsNamed) {
  const TestPort port;
  expect_error(
      ErrorCode::kNotAvailable,
      fmt::format("connect: cannot listen on {} (Address already in use)", port.place()),
      [&] { static_cast<void>(Group::connect(rendezvous_of(0, 2, port.port))); }
  );
}

TEST(RendezvousTest, RefusesWhatCannotBe) {
  const auto expect_refused = [](const Rendezvous& rendezvous, const std::string& text) {
    expect_error(ErrorCode::kInvalidArgument, text, [&] {
      static_cast<void>(Group::connect(rendezvous));
    });
  };
  expect_refused(rendezvous_of(2, 2, 5000), "connect: rank 2 is out of range (num_ranks = 2)");
  expect_refused(rendezvous_of(-1, 2, 5000), "connect: rank -1 is out of range (num_ranks = 2)");
  expect_refused(rendezvous_of(0, 0, 5000), "connect: num_ranks = 0 is too small (at least 1)");
  expect_refused(
      rendezvous_of(0, 100'000'000, 5000),
      "connect: num_ranks = 100000000 is too large (at most 16384)"
  );
  expect_refused(rendezvous_of(0, 2, 0), "connect: port 0 is out of range (1 to 65535)");
  expect_refused(rendezvous_of(0, 2, 65536), "connect: port 65536 is out of range (1 to 65535)");
  expect_refused(
      rendezvous_of(0, 2, 5000, 0ms), "connect: timeout = 0 ms is out of range (1 to 10^9)"
  );
  auto rendezvous = rendezvous_of(0, 2, 5000);
  rendezvous.secret = "fifteen letters";
  expect_refused(rendezvous, "connect: the secret has 15 B (at least 16)");
  rendezvous = rendezvous_of(1, 2, 5000);
  rendezvous.address = "no such address";
  expect_refused(rendezvous, "connect: address \"no such address\" is not known");
}

}  // namespace
}  // namespace weft
