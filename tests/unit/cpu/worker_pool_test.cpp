// SPDX-License-Identifier: Apache-2.0
#include "cpu/protocol/worker_pool.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <stdexcept>

#include "support/float_state.hpp"

namespace weft::test {
namespace {

TEST(WorkerPoolTest, RunsAJobOnceOnEveryWorker) {
  for (const int num_workers : {1, 2, 5}) {
    WorkerPool pool(num_workers);
    EXPECT_EQ(pool.num_workers(), num_workers);
    for (int round = 0; round < 200; ++round) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(num_workers));
      pool.run([&](int worker) { ++runs[static_cast<size_t>(worker)]; });
      for (const auto& count : runs) {
        ASSERT_EQ(count.load(), 1);
      }
    }
  }
}

TEST(WorkerPoolTest, UsesTheCallersThreadAsWorkerZero) {
  WorkerPool pool(3);
  std::thread::id worker_zero;
  pool.run([&](int worker) {
    if (worker == 0) {
      worker_zero = std::this_thread::get_id();
    }
  });
  EXPECT_EQ(worker_zero, std::this_thread::get_id());
}

// Workers that were made meanwhile, too, and only for the job.
TEST(WorkerPoolTest, RoundsAlikeOnEveryWorkerWhateverTheCallersThreadDoes) {
  const OddFloats odd;
  const Products before = product_bits();
  WorkerPool pool(3);
  pool.run([](int worker) { EXPECT_EQ(product_bits(), kStandardProducts) << worker; });
  EXPECT_EQ(product_bits(), before);
  EXPECT_NE(before, kStandardProducts);
}

TEST(WorkerPoolTest, VisitsEachNumberOnce) {
  for (const int num_workers : {1, 3}) {
    WorkerPool pool(num_workers);
    for (const bool is_much : {true, false}) {
      for (const size_t count : {0U, 1U, 100U}) {
        std::vector<std::atomic<int>> visits(count);
        pool.for_each(count, is_much, [&](size_t i) { ++visits[i]; });
        for (const auto& number : visits) {
          EXPECT_EQ(number.load(), 1);
        }
      }
    }
  }
}

TEST(WorkerPoolTest, LeavesLittleWorkToTheCaller) {
  WorkerPool pool(3);
  pool.for_each(100, false, [caller = std::this_thread::get_id()](size_t /*i*/) {
    ASSERT_EQ(std::this_thread::get_id(), caller);
  });
}

TEST(WorkerPoolTest, EndsVisitsAfterAFailure) {
  WorkerPool pool(3);
  std::atomic<size_t> num_visits = 0;
  const auto visit = [&](size_t i) {
    ++num_visits;
    if (i == 5) {
      throw std::runtime_error("five");
    }
    while (i > 5 && !pool.is_stopping()) {
      std::this_thread::yield();
    }
  };
  EXPECT_THROW(pool.for_each(1'000'000, true, visit), std::runtime_error);
  EXPECT_LE(num_visits.load(), 6U + 2 * 3);
}

TEST(WorkerPoolTest, RethrowsAFailureOfAnyWorkerAndStopsTheOthers) {
  WorkerPool pool(3);
  for (int failing = 0; failing < 3; ++failing) {
    const auto job = [&](int worker) {
      if (worker == failing) {
        throw std::runtime_error("worker " + std::to_string(worker));
      }
      while (!pool.is_stopping()) {
        std::this_thread::yield();
      }
    };
    try {
      pool.run(job);
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), "worker " + std::to_string(failing));
    }
  }
}

TEST(WorkerPoolTest, WorksAgainAfterAFailure) {
  WorkerPool pool(2);
  EXPECT_THROW(pool.run([](int) { throw std::runtime_error("both"); }), std::runtime_error);
  std::atomic<int> runs = 0;
  pool.run([&](int) {
    EXPECT_FALSE(pool.is_stopping());
    ++runs;
  });
  EXPECT_EQ(runs.load(), 2);
}

}  // namespace
}  // namespace weft::test
