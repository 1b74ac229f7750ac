// SPDX-License-Identifier: Apache-2.0
// Helpers that the tests of groups share.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>

#include "weft/error.hpp"
#include "weft/group.hpp"

namespace weft {

// `text` must begin the message or follow it up to " at file:line".
inline void expect_error(
    ErrorCode code, const std::string& text, const std::function<void()>& action
) {
  try {
    action();
    ADD_FAILURE() << "nothing was thrown; expected: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
        << "thrown:   " << error.what() << "\nexpected: " << text;
  }
}

inline Bytes test_block(int rank, int round) {
  const auto size = static_cast<size_t>((rank * 7 + round) % 5 * 1000);
  return Bytes(size, static_cast<std::byte>(rank * 16 + round));
}

inline void expect_gathered(const Group& group, int round) {
  const auto blocks = group.all_gather(test_block(group.rank(), round));
  ASSERT_EQ(blocks.size(), static_cast<size_t>(group.num_ranks()));
  for (int rank = 0; rank < group.num_ranks(); ++rank) {
    EXPECT_EQ(blocks[static_cast<size_t>(rank)], test_block(rank, round)) << "of rank " << rank;
  }
}

}  // namespace weft
