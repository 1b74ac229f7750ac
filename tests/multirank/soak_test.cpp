// SPDX-License-Identifier: Apache-2.0
// Ten thousand small random calls, bit-checked; tests/soak runs a million.
#include "support/soak.hpp"

#include <gtest/gtest.h>

#include "support/process_memory.hpp"

namespace weft::test {
namespace {

class SoakTest : public testing::TestWithParam<std::pair<const char*, int64_t>> {};

TEST_P(SoakTest, PassesThousandsOfRandomCalls) {
  const auto& [transport, num_calls] = GetParam();
  const auto seed = static_cast<uint64_t>(num_calls);
  EXPECT_EQ(soak(transport, seed, kIsSanitized ? num_calls / 10 : num_calls).failure, "");
}

INSTANTIATE_TEST_SUITE_P(
    All,
    SoakTest,
    testing::Values(
        std::pair("loopback", 4000),
        std::pair("shm", 4000),
        std::pair("faulty:loopback?seed=1&delay=0.05&reorder=0.5&hold_us=100", 1000),
        std::pair("faulty:shm?seed=2&reorder=1&hide_mapped=1", 1000)
    )
);

}  // namespace
}  // namespace weft::test
