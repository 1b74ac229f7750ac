// SPDX-License-Identifier: Apache-2.0
#include "core/copy.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace weft {
namespace {

// Any size at any alignment, with guard bytes around the target.
void expect_exact_copies(void (*copy)(void*, const void*, uint64_t)) {
  constexpr size_t kGuard = 64;
  constexpr uint8_t kUntouched = 0xa5;
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::vector<uint8_t> source(6000);
  for (uint8_t& byte : source) {
    byte = static_cast<uint8_t>(random());
  }
  for (int round = 0; round < 500; ++round) {
    const size_t bytes = random() % (round % 2 == 0 ? 5000 : 300);
    const size_t from = random() % 128;
    const size_t to = kGuard + random() % 128;
    std::vector<uint8_t> target(to + bytes + kGuard, kUntouched);
    copy(target.data() + to, source.data() + from, bytes);
    streaming_fence();
    std::vector<uint8_t> expected(target.size(), kUntouched);
    std::copy_n(
        source.begin() + static_cast<ptrdiff_t>(from),
        bytes,
        expected.begin() + static_cast<ptrdiff_t>(to)
    );
    ASSERT_EQ(target, expected) << bytes << " B from " << from << " to " << to;
  }
}

}  // namespace

TEST(CopyTest, CopiesExactlyTheBytes) {
  expect_exact_copies(copy_bytes);
}

TEST(CopyTest, StreamsExactlyTheBytes) {
  expect_exact_copies(copy_streaming);
}

TEST(CopyTest, AcceptsNullForNoBytes) {
  copy_bytes(nullptr, nullptr, 0);
  copy_streaming(nullptr, nullptr, 0);
  SUCCEED();
}

TEST(CopyTest, StreamsOnlyWhatOverflowsCaches) {
  EXPECT_FALSE(prefers_streaming(0));
  EXPECT_FALSE(prefers_streaming(uint64_t{16} << 20));
  EXPECT_TRUE(prefers_streaming(uint64_t{64} << 20));
}

}  // namespace weft
