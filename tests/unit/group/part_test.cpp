// SPDX-License-Identifier: Apache-2.0
// Parts of a group: its own ranks, numbered anew, all at the same time.
#include <gtest/gtest.h>

#include <algorithm>

#include "group/control_plane.hpp"
#include "group_test.hpp"

namespace weft {
namespace {

using Parts = std::vector<std::vector<int>>;

const std::vector<int>& part_with(const Parts& parts, int rank) {
  for (const std::vector<int>& members : parts) {
    if (std::ranges::find(members, rank) != members.end()) {
      return members;
    }
  }
  ADD_FAILURE() << "rank " << rank << " is in no part";
  return parts[0];
}

class GroupPartTest : public testing::TestWithParam<Parts> {
 protected:
  static void run(const std::function<void(const Group&, const std::vector<int>&)>& body) {
    size_t num_ranks = 0;
    for (const std::vector<int>& members : GetParam()) {
      num_ranks += members.size();
    }
    run_threads(static_cast<int>(num_ranks), [&](Group& group) {
      body(group, part_with(GetParam(), group.rank()));
    });
  }
};

TEST_P(GroupPartTest, NumbersItsMembersFromZero) {
  run([](const Group& group, const std::vector<int>& members) {
    const Group part = part_of(group, members);
    EXPECT_EQ(part.num_ranks(), static_cast<int>(members.size()));
    EXPECT_EQ(members[static_cast<size_t>(part.rank())], group.rank());
  });
}

TEST_P(GroupPartTest, IsOneDomain) {
  run([](const Group& group, const std::vector<int>& members) {
    const Group part = part_of(group, members);
    const Topology& topology = part.topology();
    const size_t num = members.size();
    ASSERT_EQ(topology.domains.size(), 1U);
    EXPECT_EQ(topology.domains[0].size(), num);
    EXPECT_EQ(topology.domains[0].back(), static_cast<int>(num) - 1);
    EXPECT_EQ(topology.domain_of, std::vector<int>(num, 0));
    EXPECT_EQ(topology.host_of.size(), num);
    EXPECT_EQ(topology.host_of[0], group.topology().host_of[0]);
    EXPECT_EQ(topology.one_process, group.topology().one_process);
  });
}

// Blocks differ in size and content by rank of the whole group, so that one of another part shows.
TEST_P(GroupPartTest, HearsItsMembersAlone) {
  run([](const Group& group, const std::vector<int>& members) {
    const Group part = part_of(group, members);
    for (int round = 0; round < 20; ++round) {
      const auto blocks = part.all_gather(test_block(group.rank(), round));
      ASSERT_EQ(blocks.size(), members.size());
      for (size_t i = 0; i < members.size(); ++i) {
        EXPECT_EQ(blocks[i], test_block(members[i], round)) << "of rank " << members[i];
      }
      expect_gathered(group, round);  // the whole group speaks in between
      expect_gathered(part, round);
    }
    part.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    GroupPartTest,
    testing::Values(
        Parts{{0, 1}, {2, 3}},
        Parts{{0, 2, 4}, {1, 3}},
        Parts{{0}, {1, 2}},
        Parts{{2, 3, 4}, {0, 5}, {1}},
        Parts{{0, 1, 2}}
    )
);

TEST(GroupPartOwnershipTest, OutlivesTheHandleItWasMadeFrom) {
  const Group part = part_of(Group::local(1).front(), {0});
  expect_gathered(part, 3);
}

TEST(GroupPartOwnershipTest, RefusesAStranger) {
  run_threads(3, [](Group& group) {
    if (group.rank() == 1) {
      expect_error(
          ErrorCode::kInvalidArgument,
          "group: rank 1 is not among the 2 ranks of its part [rank 1/3]",
          [&] {
            static_cast<void>(part_of(group, {0, 2}));
          }
      );
    } else {
      EXPECT_EQ(part_of(group, {0, 2}).num_ranks(), 2);
    }
    group.barrier();  // refused without a word to the others
  });
}

}  // namespace
}  // namespace weft
