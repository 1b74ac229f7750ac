// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "group/control_plane.hpp"
#include "group_test.hpp"

namespace weft {
namespace {

TEST(FromAllGatherTest, RunsOverTheCallersFunction) {
  run_threads(3, [](Group& outer) {
    int num_calls = 0;
    const Group group = Group::from_all_gather(
        outer.rank(),
        outer.num_ranks(),
        [&](std::span<const std::byte> block) {
          ++num_calls;
          return outer.all_gather(block);
        }
    );
    EXPECT_EQ(group.rank(), outer.rank());
    EXPECT_EQ(group.topology().domains, (std::vector<std::vector<int>>{{0, 1, 2}}));
    const int before = num_calls;
    expect_gathered(group, 2);
    EXPECT_EQ(num_calls, before + 1);
  });
}

TEST(FromAllGatherTest, RefusesWhatCannotBe) {
  const auto alone = [](std::span<const std::byte> block) {
    return std::vector<Bytes>{Bytes(block.begin(), block.end())};
  };
  const auto expect_refused = [](int rank, int num_ranks, AllGather function, const char* text) {
    expect_error(ErrorCode::kInvalidArgument, text, [&] {
      static_cast<void>(Group::from_all_gather(rank, num_ranks, std::move(function)));
    });
  };
  expect_refused(0, 0, alone, "group: num_ranks = 0 is too small (at least 1)");
  expect_refused(2, 2, alone, "group: rank 2 is out of range (num_ranks = 2)");
  expect_refused(-1, 2, alone, "group: rank -1 is out of range (num_ranks = 2)");
  expect_refused(0, 1, nullptr, "group: all_gather is empty [rank 0/1]");
  expect_refused(
      0, 2, alone, "all_gather: the function returned 1 blocks (one per rank: 2) [rank 0/2]"
  );
}

TEST(FromAllGatherTest, NamesARankOfAnotherVersion) {
  run_threads(3, [](Group& outer) {
    const auto as_the_next_version = [&](std::span<const std::byte> block) {
      auto blocks = outer.all_gather(block);
      blocks[1][0] = static_cast<std::byte>(kProtocolVersion + 1);
      return blocks;
    };
    const std::string text =
        fmt::format("topology: rank 1 speaks version {} in ", kProtocolVersion + 1);
    expect_error(ErrorCode::kPeerFailed, text, [&] {
      static_cast<void>(Group::from_all_gather(outer.rank(), 3, as_the_next_version));
    });
  });
}

TEST(BlockValueTest, NamesTheRankWhoseBlockIsTooShort) {
  const Bytes block(8, std::byte{1});
  EXPECT_EQ(block_value<uint32_t>(block, 3, {0, 4}), 0x01010101U);
  expect_error(
      ErrorCode::kPeerFailed,
      "all_gather: rank 3 sent 7 B where 8 B are expected (are all ranks in the same call",
      [] {
        static_cast<void>(block_value<uint64_t>(Bytes(7), 3, {0, 4}));
      }
  );
}

TEST(FromAllGatherTest, PassesTheFunctionsOwnErrorOn) {
  EXPECT_THROW(
      static_cast<void>(Group::from_all_gather(
          0,
          2,
          [](std::span<const std::byte>) -> std::vector<Bytes> {
            throw std::domain_error("theirs");
          }
      )),
      std::domain_error
  );
}

}  // namespace
}  // namespace weft
