// SPDX-License-Identifier: Apache-2.0
#include "cuda/exchange/refusal_board.hpp"

#include <gtest/gtest.h>

#include "weft/group.hpp"

namespace weft::test {
namespace {

std::string reason_of(int rank, uint32_t call) {
  return "rank " + std::to_string(rank) + " in call " + std::to_string(call);
}

std::string said(const RefusalBoard& board, int rank, uint32_t call) {
  return std::string(board.reason(rank, call).value_or(Refusal()).text());
}

// Every rank refuses some calls, and hears why all others refused theirs.
void expect_reasons(const Group& group) {
  const RefusalBoard board(group);
  for (uint32_t call = 1; call <= 100; ++call) {
    board.post(call, reason_of(group.rank(), call));
    group.barrier();
    for (int rank = 0; rank < group.num_ranks(); ++rank) {
      ASSERT_EQ(said(board, rank, call), reason_of(rank, call));
      ASSERT_EQ(said(board, rank, call + 8), "") << "not told yet";
    }
    group.barrier();
  }
}

TEST(RefusalBoardTest, ThreadsReadWhyAnotherRefused) {
  run_threads(3, expect_reasons);
}

TEST(RefusalBoardTest, ProcessesReadWhyAnotherRefused) {
  const std::vector<int> status = run_forked(3, [](Group& group) {
    expect_reasons(group);
    return ::testing::Test::HasFailure() ? 1 : 0;
  });
  EXPECT_EQ(status, std::vector<int>(3, 0));
}

TEST(RefusalBoardTest, KeepsTheBeginOfALongReasonAndNothingOfOthers) {
  run_threads(1, [](const Group& group) {
    const RefusalBoard board(group);
    board.post(UINT32_MAX, std::string(600, 'x'));
    EXPECT_EQ(said(board, 0, UINT32_MAX), std::string(511, 'x'));
    EXPECT_EQ(said(board, 0, 0), "");
    board.post(UINT32_MAX - 8, "of another call");
    EXPECT_EQ(said(board, 0, UINT32_MAX), "");
  });
}

TEST(RefusalBoardTest, TellsWhichCallWasInterrupted) {
  run_threads(3, [](const Group& group) {
    const RefusalBoard board(group);
    const auto number = static_cast<uint32_t>(group.rank());  // 0 is a number, too
    if (group.rank() != 1) {
      board.interrupt(number);
    }
    group.barrier();
    EXPECT_EQ(board.interrupted(0), 0U);
    EXPECT_EQ(board.interrupted(1), std::nullopt);
    EXPECT_EQ(board.interrupted(2), 2U);
    group.barrier();
  });
}

// A text that changes while it is read is told whole or not at all.
TEST(RefusalBoardTest, NeverTellsHalfOfAReason) {
  run_threads(2, [](const Group& group) {
    constexpr uint32_t kCalls = 20000;
    const RefusalBoard board(group);
    group.barrier();
    for (uint32_t call = 8; call <= 8 * kCalls; call += 8) {
      if (group.rank() == 0) {
        board.post(call, std::string(500, static_cast<char>('a' + call / 8 % 26)));
      } else {
        const std::string text = said(board, 0, call);
        const char wanted = static_cast<char>('a' + call / 8 % 26);
        ASSERT_TRUE(text.empty() || text == std::string(500, wanted)) << text;
      }
    }
    group.barrier();
  });
}

}  // namespace
}  // namespace weft::test
