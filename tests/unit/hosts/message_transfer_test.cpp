// SPDX-License-Identifier: Apache-2.0
// Messages between ranks that are threads, packed by other threads in a GPU's place.
#include "hosts/message_transfer.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "support/errors.hpp"
#include "transfer_rank.hpp"

namespace weft::test {
namespace {

using std::chrono::milliseconds;

constexpr int64_t rows_between(int from, int to) {
  return from == to ? 0 : (from * 5 + to * 3 + 1) % 14;
}
static_assert(rows_between(2, 1) == 0 && rows_between(1, 2) == 12);  // four messages

class MessageTransferTest : public testing::TestWithParam<const char*> {};

TEST_P(MessageTransferTest, CarriesBothWaysBetweenSeveralPeers) {
  constexpr int kRanks = 4;
  run_threads(kRanks, [&](Group& group) {
    TransferRank rank(group, GetParam());
    for (uint32_t call = 1; call <= 20; ++call) {
      std::vector<MessageSend> sends;
      std::vector<MessageReceive> receives;
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer != group.rank()) {
          sends.push_back(rank.send_to(peer, rows_between(group.rank(), peer), call));
          receives.push_back(rank.receive_from(peer, rows_between(peer, group.rank())));
        }
      }
      rank.clear();
      group.barrier();
      std::vector<int64_t> taken(receives.size());
      {
        const std::jthread packer([&] { rank.pack(sends, /*in_turn=*/call % 2 == 0); });
        rank.run(sends, receives, [&](size_t i, int64_t c) {
          EXPECT_EQ(c, taken[i]++);
          rank.expect_message(receives[i], c, call);
        });
      }
      for (size_t i = 0; i < receives.size(); ++i) {
        EXPECT_EQ(taken[i], kChunk.num_chunks(receives[i].count));
        rank.expect_area(receives[i], call);
      }
      group.barrier();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    MessageTransferTest,
    testing::Values(
        "loopback",
        "faulty:loopback?seed=3&delay=0.3&hold_us=300&hide_mapped=1",
        "faulty:loopback?seed=4&delay=0.9&hold_us=100"
    )
);

TEST(MessageTransferOrderTest, PackingLateForOnePeerHoldsUpNoOther) {
  std::atomic<bool> has_second_all = false;
  run_threads(3, [&](Group& group) {
    TransferRank rank(group, "loopback");
    if (group.rank() == 0) {
      const std::vector<MessageSend> sends = {rank.send_to(1, 7, 1), rank.send_to(2, 7, 1)};
      const std::jthread packer([&] {
        rank.pack({&sends[1], 1}, false);
        has_second_all.wait(false);
        rank.pack({&sends[0], 1}, false);
      });
      rank.run(sends, {}, [](size_t, int64_t) { FAIL() << "nobody sends to rank 0"; });
    } else {
      const std::vector<MessageReceive> receives = {rank.receive_from(0, 7)};
      rank.run({}, receives, [&](size_t, int64_t c) { rank.expect_message(receives[0], c, 1); });
      if (group.rank() == 2) {
        has_second_all = true;
        has_second_all.notify_all();
      }
    }
    group.barrier();
  });
}

TEST(MessageTransferOrderTest, TakesWhatHasComeWhileItsOwnIsNotPacked) {
  run_threads(2, [](Group& group) {
    TransferRank rank(group, "loopback");
    const int peer = 1 - group.rank();
    const std::vector<MessageSend> sends = {rank.send_to(peer, 8, 1)};
    const std::vector<MessageReceive> receives = {rank.receive_from(peer, 8)};
    std::atomic<int64_t> num_taken = 0;
    const std::jthread packer([&] {
      while (group.rank() == 0 && num_taken < kChunk.num_chunks(8)) {
        std::this_thread::yield();
      }
      rank.pack(sends, false);
    });
    rank.run(sends, receives, [&](size_t, int64_t) { ++num_taken; });
    EXPECT_EQ(num_taken, kChunk.num_chunks(8));
    group.barrier();
  });
}

// A message may be packed before an earlier one, and what an earlier call left says nothing.
TEST(MessageTransferOrderTest, PutsMessagesInOrderAndOfThisPackingAlone) {
  run_threads(1, [](Group& group) {
    TransferRank rank(group, "loopback");
    for (uint32_t call = 1; call <= 2; ++call) {
      const std::vector<MessageSend> sends = {rank.send_to(0, 7, call)};
      const std::vector<MessageReceive> receives = {rank.receive_from(0, 7)};
      rank.clear();
      rank.pack_message(sends[0], 2);
      rank.pack_message(sends[0], 1);
      std::vector<int64_t> taken;
      rank.run(
          sends,
          receives,
          [&](size_t, int64_t c) {
            rank.expect_message(receives[0], c, call);
            taken.push_back(c);
          },
          [&] {
            EXPECT_TRUE(taken.empty());
            rank.pack_message(sends[0], 0);
          }
      );
      EXPECT_EQ(taken, (std::vector<int64_t>{0, 1, 2}));
      rank.expect_area(receives[0], call);
    }
  });
}

TEST(MessageTransferOrderTest, ReturnsAtOnceWithoutRows) {
  run_threads(2, [](Group& group) {
    TransferRank rank(group, "loopback");
    const auto never = [](size_t, int64_t) { FAIL(); };
    const auto no_look = [] { FAIL(); };
    const int peer = 1 - group.rank();
    rank.run({}, {}, never, no_look);
    MessageSend to_peer;
    to_peer.to = peer;
    const MessageReceive from_peer = {.from = peer};
    rank.run({&to_peer, 1}, {&from_peer, 1}, never, no_look);
    group.barrier();
    EXPECT_EQ(rank.transport().signal_value(rank.receive_from(peer, 0).first_signal), 0U);
  });
}

TEST(MessageTransferFaultTest, NamesTheGpuThatDoesNotPackAndTheRankThatDoesNotSend) {
  run_threads(2, [](Group& group) {
    TransferRank rank(group, "loopback", milliseconds(100));
    const auto thrown = thrown_by([&] {
      if (group.rank() == 0) {
        // One of the two packings is complete: it is not the one to name.
        const std::vector<MessageSend> sends = {rank.send_to(0, 3, 1), rank.send_to(1, 7, 1)};
        rank.pack_message(sends[0], 0);
        rank.pack_message(sends[1], 0);
        rank.run(sends, {}, [](size_t, int64_t) {});
      } else {
        const std::vector<MessageReceive> receives = {rank.receive_from(0, 7)};
        while (rank.transport().signal_value(receives[0].first_signal) == 0) {
          std::this_thread::yield();
        }
        int64_t num_taken = 0;
        rank.run({}, receives, [&](size_t, int64_t c) { EXPECT_EQ(c, num_taken++); });
      }
    });
    EXPECT_EQ(
        text_of(thrown),
        group.rank() == 0 ? "dispatch: call 7: the GPU has packed 1 of 3 messages for rank 1 (no "
                            "other within 100 ms) [rank 0/2, loopback]"
                          : "dispatch: no rows for 0.1 s from rank 0 (signal 1 at 0 of 1) (call "
                            "7). Is the peer alive and in the same call? [rank 1/2, loopback]"
    );
    EXPECT_TRUE(thrown && thrown->is_timeout);
    group.barrier();  // else the other would see this one leave
  });
}

TEST(MessageTransferFaultTest, NamesAllThatAreLate) {
  run_threads(3, [](Group& group) {
    TransferRank rank(group, "loopback", milliseconds(100));
    if (group.rank() == 0) {
      const std::vector<MessageReceive> receives = {
          rank.receive_from(1, 3), rank.receive_from(2, 4)};
      const auto thrown = thrown_by([&] { rank.run({}, receives, [](size_t, int64_t) {}); });
      EXPECT_EQ(
          text_of(thrown),
          "dispatch: no rows for 0.1 s from rank 1 (signal 8 at 0 of 1), rank 2 (signal 16 at 0 of "
          "1) (call 7). Is the peer alive and in the same call? [rank 0/3, loopback]"
      );
    }
    group.barrier();
  });
}

TEST(MessageTransferFaultTest, NamesAPeerThatLeaves) {
  run_threads(2, [](Group& group) {
    TransferRank rank(group, "loopback");
    if (group.rank() == 1) {
      const std::vector<MessageSend> sends = {rank.send_to(0, 3, 1)};
      rank.pack(sends, false);
      rank.run(sends, {}, [](size_t, int64_t) {});
      rank.transport().close();
      return;
    }
    const std::vector<MessageReceive> receives = {rank.receive_from(1, 7)};
    int num_taken = 0;
    const auto thrown =
        thrown_by([&] { rank.run({}, receives, [&](size_t, int64_t) { ++num_taken; }); });
    EXPECT_EQ(num_taken, 1);
    EXPECT_EQ(
        text_of(thrown),
        "dispatch: rank 1 left the exchange before its rows arrived (call 7, signal 9 at 0 of 1) "
        "[rank 0/2, loopback]"
    );
    EXPECT_TRUE(thrown && thrown->is_peer_error);
  });
}

TEST(MessageTransferFaultTest, EndsWhenSomethingElseHasGoneWrong) {
  run_threads(2, [](Group& group) {
    TransferRank rank(group, "loopback");
    if (group.rank() == 0) {
      const std::vector<MessageSend> sends = {rank.send_to(1, 7, 1)};
      rank.pack_message(sends[0], 0);
      const auto thrown = thrown_by([&] {
        rank.run(
            sends,
            {},
            [](size_t, int64_t) {},
            [] { raise_error(ErrorCode::kCuda, {}, "dispatch: a kernel failed"); }
        );
      });
      EXPECT_EQ(text_of(thrown), "dispatch: a kernel failed");
    }
    group.barrier();
    // Messages packed before had gone out.
    EXPECT_EQ(rank.transport().signal_value(0), group.rank() == 1 ? 1U : 0U);
    group.barrier();
  });
}

TEST(MessageTransferFaultTest, EndsWhenSomethingGoesWrongWhileNothingComes) {
  run_threads(2, [](Group& group) {
    TransferRank rank(group, "loopback");
    if (group.rank() == 0) {
      const std::vector<MessageReceive> receives = {rank.receive_from(1, 3)};
      int num_looks = 0;
      const auto thrown = thrown_by([&] {
        rank.run(
            {},
            receives,
            [](size_t, int64_t) {},
            [&] {
              if (++num_looks == 2) {
                raise_error(ErrorCode::kCuda, {}, "dispatch: a kernel failed");
              }
            }
        );
      });
      EXPECT_EQ(text_of(thrown), "dispatch: a kernel failed");
    }
    group.barrier();
  });
}

TEST(MessageTransferFaultTest, PassesOnWhatThePutThrows) {
  run_threads(2, [](Group& group) {
    TransferRank rank(group, "faulty:loopback?fail=1");
    const std::vector<MessageSend> sends = {rank.send_to(1 - group.rank(), 3, 1)};
    rank.pack(sends, false);
    const auto thrown = thrown_by([&] { rank.run(sends, {}, [](size_t, int64_t) {}); });
    EXPECT_NE(text_of(thrown).find("failed (on purpose)"), std::string::npos) << text_of(thrown);
    group.barrier();
  });
}

}  // namespace
}  // namespace weft::test
