// SPDX-License-Identifier: Apache-2.0
#include "cpu/protocol/buffer_pool.hpp"

#include <gtest/gtest.h>

#include <thread>

#include "core/size_class.hpp"
#include "fake_transport.hpp"

namespace weft::test {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class BufferPoolTest : public testing::Test {
 protected:
  std::shared_ptr<FakeTransport> transport_ = std::make_shared<FakeTransport>();
  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>(transport_);
};

TEST(SizeClassTest, RoundsUpByAQuarterAtMost) {
  EXPECT_EQ(size_class(0), 64U << 10);
  EXPECT_EQ(size_class(64 << 10), 64U << 10);
  EXPECT_EQ(size_class(kMiB), kMiB);
  EXPECT_EQ(size_class(kMiB + 1), kMiB + kMiB / 4);
  EXPECT_EQ(size_class(2 * kMiB - 1), 2 * kMiB);
  uint64_t previous = 0;
  for (uint64_t bytes = 1; bytes < 64 * kMiB; bytes = bytes * 9 / 8 + 1) {
    const uint64_t rounded = size_class(bytes);
    EXPECT_GE(rounded, bytes);
    EXPECT_GE(rounded, previous);
    EXPECT_EQ(size_class(rounded), rounded);
    if (bytes > 64 << 10) {
      EXPECT_LE(rounded, bytes + bytes / 4 + 1) << bytes;
    }
    previous = rounded;
  }
}

TEST_F(BufferPoolTest, ReusesWhatWasGivenBack) {
  const std::byte* first = pool_->take(kMiB)->data;
  EXPECT_EQ(pool_->take(kMiB - 1000)->data, first);
  EXPECT_EQ(pool_->take(kMiB * 3 / 4)->data, first);
  EXPECT_EQ(transport_->num_allocations, 1);
}

TEST_F(BufferPoolTest, NeverGivesOneRegionTwice) {
  const auto first = pool_->take(kMiB);
  const auto second = pool_->take(kMiB);
  EXPECT_NE(first->data, second->data);
}

TEST_F(BufferPoolTest, TakesNoRegionMoreThanTwiceTooBig) {
  static_cast<void>(pool_->take(8 * kMiB));
  static_cast<void>(pool_->take(kMiB));
  EXPECT_EQ(transport_->num_allocations, 2);
}

TEST_F(BufferPoolTest, FindsTheLiveRegionThatContainsBytes) {
  auto region = pool_->take(kMiB);
  const std::byte* data = region->data;
  EXPECT_EQ(pool_->find(data, kMiB)->data, data);
  EXPECT_EQ(pool_->find(data + 100, 16)->data, data);
  EXPECT_FALSE(pool_->find(data, region->ref.bytes + 1).has_value());
  EXPECT_FALSE(pool_->find(data - 1, 2).has_value());
  const std::byte elsewhere{};
  EXPECT_FALSE(pool_->find(&elsewhere, 1).has_value());
  region.reset();
  EXPECT_FALSE(pool_->find(data, 16).has_value());
}

TEST_F(BufferPoolTest, CountsUsedAndUnusedBytes) {
  auto region = pool_->take(kMiB);
  EXPECT_EQ(pool_->used_bytes(), kMiB);
  EXPECT_EQ(pool_->unused_bytes(), 0U);
  region.reset();
  EXPECT_EQ(pool_->used_bytes(), 0U);
  EXPECT_EQ(pool_->unused_bytes(), kMiB);
}

TEST_F(BufferPoolTest, GivesUnusedRegionsToTheSystemWhenAsked) {
  const auto kept = pool_->take(kMiB);
  static_cast<void>(pool_->take(4 * kMiB));
  pool_->release_unused();
  EXPECT_EQ(pool_->unused_bytes(), 0U);
  EXPECT_EQ(transport_->regions.size(), 1U);
  EXPECT_EQ(pool_->find(kept->data, 1)->data, kept->data);
}

TEST_F(BufferPoolTest, KeepsABoundedAmountOfUnusedMemory) {
  for (uint64_t size = 1; size <= 24; ++size) {  // most are a class of their own
    static_cast<void>(pool_->take(size * kMiB));
  }
  EXPECT_LE(pool_->unused_bytes(), (64 + 24) * kMiB);
  EXPECT_LT(transport_->regions.size(), 10U);
}

TEST_F(BufferPoolTest, TakesRegionsBackFromAnyThread) {
  std::vector<std::shared_ptr<const Region>> regions;
  for (int i = 0; i < 4; ++i) {
    regions.push_back(pool_->take(kMiB));
  }
  std::vector<std::thread> threads;
  for (auto& region : regions) {
    threads.emplace_back([own = std::move(region)]() mutable { own.reset(); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(pool_->used_bytes(), 0U);
  EXPECT_EQ(pool_->unused_bytes(), 4 * kMiB);
}

TEST_F(BufferPoolTest, LivesAsLongAsItsLastRegion) {
  auto region = pool_->take(kMiB);
  const std::weak_ptr<BufferPool> watch = pool_;
  pool_.reset();
  EXPECT_FALSE(watch.expired());
  region.reset();
  EXPECT_TRUE(watch.expired());
}

}  // namespace
}  // namespace weft::test
