// SPDX-License-Identifier: Apache-2.0
#include "group/agree.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "core/check.hpp"

namespace weft {

TEST(AgreeTest, ReturnsWhenEveryRankSucceeds) {
  run_threads(3, [](Group& group) {
    int num_calls = 0;
    agree(group, [&] { ++num_calls; });
    EXPECT_EQ(num_calls, 1);
  });
}

TEST(AgreeTest, ThrowsTheReasonOfTheLowestRankOnAllRanks) {
  run_threads(4, [](Group& group) {
    try {
      agree(group, [&] {
        WEFT_CHECK(
            (Context{.rank = group.rank(), .num_ranks = 4}),
            group.rank() != 1 && group.rank() != 3,
            ErrorCode::kOutOfMemory,
            "allocate: no room for {} B",
            group.rank() * 100
        );
      });
      ADD_FAILURE() << "rank " << group.rank() << " saw no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      EXPECT_EQ(error.rank(), group.rank());
      const std::string text = error.what();
      EXPECT_EQ(text.rfind("allocate: no room for 100 B", 0), 0U) << text;
      EXPECT_NE(text.find(fmt::format("[rank {}/4]", group.rank())), std::string::npos) << text;
    }
  });
}

TEST(AgreeTest, CarriesForeignExceptionsAsDefects) {
  run_threads(2, [](Group& group) {
    try {
      agree(group, [&] {
        if (group.rank() == 0) {
          throw std::runtime_error("odd");
        }
      });
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInternal);
      EXPECT_NE(std::string(error.what()).find("odd"), std::string::npos);
    }
  });
}

}  // namespace weft
