// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <semaphore>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "hosts/message_transfer.hpp"

namespace weft {
namespace {

TransferThread::Job job(std::function<void()> run) {
  return {std::move(run), [] {}};
}

TEST(TransferThreadTest, RunsBesideItsCaller) {
  TransferThread thread;
  EXPECT_FALSE(thread.is_running());
  std::binary_semaphore gate(0);
  std::thread::id runner;
  thread.start(job([&] {
    gate.acquire();
    runner = std::this_thread::get_id();
  }));
  EXPECT_TRUE(thread.is_running());
  gate.release();
  thread.wait();
  EXPECT_FALSE(thread.is_running());
  EXPECT_NE(runner, std::this_thread::get_id());
}

TEST(TransferThreadTest, RunsOneJobAfterTheOther) {
  TransferThread thread;
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) {
    thread.start(job([&order, i] { order.push_back(i); }));
  }
  thread.wait();
  ASSERT_EQ(order.size(), 100U);
  EXPECT_TRUE(std::ranges::is_sorted(order));
  thread.wait();  // for nothing
}

TEST(TransferThreadTest, GivesUpWhatFollowsAFailure) {
  TransferThread thread;
  std::binary_semaphore gate(0);
  std::vector<int> given_up;
  std::vector<int> run;
  thread.start(job([&] { gate.acquire(); }));  // the others shall be waiting
  for (int i = 0; i < 3; ++i) {
    thread.start(
        {[&, i] {
           run.push_back(i);
           throw std::runtime_error("the line is dead");
         },
         [&, i] { given_up.push_back(i); }}
    );
  }
  gate.release();
  EXPECT_THROW(thread.wait(), std::runtime_error);
  EXPECT_EQ(run, std::vector<int>{0});
  EXPECT_EQ(given_up, (std::vector<int>{0, 1, 2}));
  thread.wait();
  thread.start(job([&] { run.push_back(7); }));
  thread.wait();
  EXPECT_EQ(run, (std::vector<int>{0, 7}));
}

TEST(TransferThreadTest, EndsAfterItsJobs) {
  std::atomic<int> count = 0;
  {
    TransferThread thread;
    for (int i = 0; i < 3; ++i) {
      thread.start(job([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        ++count;
      }));
    }
  }
  EXPECT_EQ(count, 3);
}

TEST(MessageCountsTest, GoOnFromCallToCall) {
  std::array<uint32_t, 3> words = {};
  MessageCounts counts(words);
  EXPECT_EQ(counts.expect(1, 2), 0U);
  EXPECT_EQ(counts.expect(1, 5), 2U);
  EXPECT_EQ(counts.expect(2, 4), 0U);
  EXPECT_EQ(counts.word(1), &words[1]);
  EXPECT_FALSE(counts.has_reached(1, 1));
  counts.set(1, 2);
  EXPECT_TRUE(counts.has_reached(1, 1));
  EXPECT_TRUE(counts.has_reached(1, 2));
  EXPECT_FALSE(counts.has_reached(1, 3));
  EXPECT_EQ(words, (std::array<uint32_t, 3>{0, 2, 0}));
}

TEST(MessageCountsTest, GoOnBeyondTheirRange) {
  std::array<uint32_t, 1> words = {};
  MessageCounts counts(words);
  counts.expect(0, 0xfffffffeU);
  counts.set(0, 0xfffffffeU);
  EXPECT_EQ(counts.expect(0, 4), 0xfffffffeU);
  EXPECT_FALSE(counts.has_reached(0, 1));
  counts.set(0, 1);
  EXPECT_TRUE(counts.has_reached(0, 0xffffffffU));
  EXPECT_TRUE(counts.has_reached(0, 1));
  EXPECT_FALSE(counts.has_reached(0, 2));
}

}  // namespace
}  // namespace weft
