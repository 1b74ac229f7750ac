// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <latch>

#include "group/tcp/frame.hpp"
#include "group/tcp/rendezvous.hpp"
#include "group_test.hpp"
#include "tcp_ranks.hpp"

namespace weft {
namespace {

using namespace std::chrono_literals;

std::vector<std::string> errors_of(const std::vector<Outcome>& outcomes) {
  std::vector<std::string> errors;
  for (const Outcome& outcome : outcomes) {
    errors.push_back(outcome.error.substr(0, outcome.error.find(" [rank ")));
  }
  return errors;
}

// The bare control planes, whose timeout is shorter than that of the rendezvous before.
void run_controls(
    TestPort& port,
    int num_ranks,
    std::chrono::milliseconds timeout,
    const std::function<void(int rank, const AllGather&)>& body
) {
  std::vector<std::jthread> threads;
  for (const Rendezvous& place : rendezvous_of_all(num_ranks, port.port)) {
    threads.emplace_back([&, place] {
      const Context context{place.rank, num_ranks, "tcp"};
      const auto control =
          place.rank == 0 ? make_tcp_root(admit_ranks(place, std::move(port.listener)), timeout)
                          : make_tcp_peer(join_ranks(place), context, timeout);
      body(place.rank, control);
    });
  }
}

TEST(TcpControlTest, GathersBlocksOfAnySizeByRank) {
  for (const int num_ranks : {1, 2, 5}) {
    TestPort port;
    const auto outcomes =
        run_connected(port, rendezvous_of_all(num_ranks, port.port), [](Group& group) {
          for (int round = 0; round < 20; ++round) {
            expect_gathered(group, round);
          }
        });
    EXPECT_EQ(errors_of(outcomes), std::vector<std::string>(outcomes.size()));
  }
}

TEST(TcpControlTest, GathersBlocksLargerThanAnySocketBuffer) {
  TestPort port;
  const auto outcomes = run_connected(port, rendezvous_of_all(3, port.port), [](Group& group) {
    const Bytes own(size_t{6} << 20, static_cast<std::byte>(group.rank() + 1));
    const auto blocks = group.all_gather(own);
    for (size_t rank = 0; rank < blocks.size(); ++rank) {
      EXPECT_EQ(blocks[rank], Bytes(own.size(), static_cast<std::byte>(rank + 1)));
    }
  });
  EXPECT_EQ(errors_of(outcomes), std::vector<std::string>(3));
}

TEST(TcpControlTest, NamesARankThatLeftOnEveryRank) {
  TestPort port;
  const auto outcomes = run_connected(port, rendezvous_of_all(4, port.port), [](Group& group) {
    if (group.rank() != 2) {
      group.barrier();
    }
  });
  const std::string text = "all_gather: rank 2 left the group (its connection closed)";
  EXPECT_EQ(errors_of(outcomes), (std::vector<std::string>{text, text, "", text}));
  EXPECT_EQ(outcomes[3].code, ErrorCode::kPeerFailed);
}

TEST(TcpControlTest, NamesRankZeroWhenItLeft) {
  TestPort port;
  const auto outcomes = run_connected(port, rendezvous_of_all(3, port.port), [](Group& group) {
    if (group.rank() != 0) {
      group.barrier();
    }
  });
  const std::string text = "all_gather: rank 0 left the group (its connection closed)";
  EXPECT_EQ(errors_of(outcomes), (std::vector<std::string>{"", text, text}));
  EXPECT_EQ(outcomes[1].code, ErrorCode::kPeerFailed);
}

// Ranks 1 and 3 stay, silent, until the others have seen the error.
TEST(TcpControlTest, NamesTheRanksThatDidNotCallOnEveryRank) {
  TestPort port;
  std::latch is_seen(2);
  run_controls(port, 4, 200ms, [&](int rank, const AllGather& all_gather) {
    if (rank == 1 || rank == 3) {
      is_seen.wait();
      return;
    }
    expect_error(
        ErrorCode::kTimeout,
        "all_gather: ranks 1 and 3 did not call within 0.2 s [rank",
        [&] { static_cast<void>(all_gather({})); }
    );
    is_seen.count_down();
  });
}

TEST(TcpControlTest, NamesRankZeroWhenItDidNotCall) {
  TestPort port;
  std::latch is_seen(1);
  run_controls(port, 2, 200ms, [&](int rank, const AllGather& all_gather) {
    if (rank == 0) {
      is_seen.wait();
      return;
    }
    expect_error(
        ErrorCode::kTimeout,
        "all_gather: rank 0 did not answer within 0.2 s (it or another rank has not called) [rank",
        [&] { static_cast<void>(all_gather({})); }
    );
    is_seen.count_down();
  });
}

TEST(TcpControlTest, SaysTheSameAgainAfterAFailure) {
  TestPort port;
  const auto outcomes = run_connected(port, rendezvous_of_all(3, port.port), [](Group& group) {
    if (group.rank() == 1) {
      return;
    }
    for (int i = 0; i < 3; ++i) {
      expect_error(ErrorCode::kPeerFailed, "all_gather: rank 1 left the group", [&] {
        group.barrier();
      });
    }
  });
  EXPECT_EQ(errors_of(outcomes), std::vector<std::string>(3));
}

TEST(FrameTest, BlocksUnpackAsTheyWerePacked) {
  const std::vector<Bytes> blocks = {test_block(1, 1), {}, test_block(2, 4)};
  const auto unpacked = unpack_blocks(pack_blocks(blocks), 3);
  ASSERT_TRUE(unpacked);
  EXPECT_EQ(*unpacked, blocks);
}

TEST(FrameTest, RefusesBytesThatAreNotPackedBlocks) {
  const std::vector<Bytes> blocks = {Bytes(5), Bytes(7)};
  Bytes packed = pack_blocks(blocks);
  for (size_t size = 0; size < packed.size(); ++size) {
    EXPECT_FALSE(unpack_blocks(std::span(packed).first(size), 2)) << size;
  }
  packed.push_back({});
  EXPECT_FALSE(unpack_blocks(packed, 2));
  packed.pop_back();
  packed[7] = std::byte{0xff};  // a first block of about 2^64 bytes
  EXPECT_FALSE(unpack_blocks(packed, 2));
}

}  // namespace
}  // namespace weft
