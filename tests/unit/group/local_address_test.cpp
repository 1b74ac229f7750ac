// SPDX-License-Identifier: Apache-2.0
#include "group/tcp/local_address.hpp"

#include <gtest/gtest.h>

#include <string>

#include "group_test.hpp"

namespace weft {
namespace {

TEST(LocalAddressTest, BindsToLoopbackUnlessTold) {
  EXPECT_EQ(local_address(""), "127.0.0.1");
  EXPECT_EQ(local_address("lo"), "127.0.0.1");
  EXPECT_EQ(local_address("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(local_address("127.0.0.0/8"), "127.0.0.1");
}

TEST(LocalAddressTest, NamesWhatIsNoAddressOfThisHost) {
  for (const char* wrong : {"avian0", "198.51.100.7", "198.51.100.0/24", "127.0.0.1/33", "::g"}) {
    const auto find = [&] { static_cast<void>(local_address(wrong)); };
    const std::string text = std::string("WEFT_FABRIC_ADDRESS = \"") + wrong + "\" is no";
    expect_error(ErrorCode::kNotAvailable, text, find);
    expect_error(ErrorCode::kNotAvailable, "lo 127.0.0.1", find);
  }
}

}  // namespace
}  // namespace weft
