// SPDX-License-Identifier: Apache-2.0
#include "transport/faulty/faulty_transport.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "conformance/transport_conformance.hpp"

namespace weft {
namespace {

// A rank alone that puts to itself.
class FaultyTransportTest : public ::testing::Test {
 protected:
  void open(const FaultPlan& plan) {
    faulty_ = std::make_unique<FaultyTransport>(make_transport("auto", group_, 2), plan, group_);
    region_ = faulty_->allocate(4096);
    faulty_->import(0, region_.ref);
  }

  void put(uint64_t value, uint64_t at) {
    const Put put = {
        .source = &value,
        .bytes = sizeof value,
        .region = region_.ref.slot,
        .signal = 0,
        .offset = at * sizeof value};
    faulty_->put(0, std::span(&put, 1));
  }

  [[nodiscard]] uint64_t read(uint64_t at) const {
    return reinterpret_cast<const uint64_t*>(region_.data)[at];
  }

  Group group_ = std::move(Group::local(1).front());
  std::unique_ptr<FaultyTransport> faulty_;
  Region region_;
};

}  // namespace

TEST_F(FaultyTransportTest, PassesEverythingByDefault) {
  open({});
  for (uint64_t i = 0; i < 10; ++i) {
    put(i + 1, i);
    EXPECT_EQ(faulty_->signal_value(0), i + 1);
    EXPECT_EQ(read(i), i + 1);
  }
  faulty_->raise(0, 1, 5);
  EXPECT_EQ(faulty_->signal_value(1), 5U);
  EXPECT_NE(faulty_->mapped(0, region_.ref.slot), nullptr);
  EXPECT_EQ(faulty_->name(), "faulty:loopback");
}

TEST_F(FaultyTransportTest, NeverDeliversWhatItDrops) {
  open({.drop = 1});
  put(7, 0);
  faulty_->raise(0, 1, 1);
  faulty_->park(faulty_->doorbell(), std::chrono::milliseconds(5));
  faulty_->close();  // sends what was held, and this was not
  EXPECT_EQ(faulty_->signal_value(0), 0U);
  EXPECT_EQ(faulty_->signal_value(1), 0U);
  EXPECT_EQ(read(0), 0U);
}

TEST_F(FaultyTransportTest, DelaysAPutUntilARankParks) {
  open({.delay = 1, .hold = std::chrono::hours(1)});
  for (uint64_t i = 0; i < 10; ++i) {
    put(i + 1, i);
  }
  faulty_->progress();  // nothing is due yet
  EXPECT_EQ(faulty_->signal_value(0), 0U);
  faulty_->park(faulty_->doorbell(), std::chrono::milliseconds(1));
  ASSERT_EQ(faulty_->signal_value(0), 10U);
  for (uint64_t i = 0; i < 10; ++i) {
    EXPECT_EQ(read(i), i + 1) << "the caller's source was gone by then";
  }
}

TEST_F(FaultyTransportTest, DeliversLateWithoutHelp) {
  open({.delay = 1, .hold = std::chrono::milliseconds(2)});
  put(7, 0);
  faulty_->raise(0, 1, 3);
  for (int look = 0; look < 10'000 && faulty_->signal_value(1) + faulty_->signal_value(0) < 4;
       ++look) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ASSERT_EQ(faulty_->signal_value(0), 1U);
  EXPECT_EQ(faulty_->signal_value(1), 3U);
  EXPECT_EQ(read(0), 7U);
}

TEST_F(FaultyTransportTest, SendsWhatItHoldsWhenClosed) {
  open({.delay = 1, .hold = std::chrono::hours(1)});
  put(7, 0);
  faulty_->close();
  EXPECT_EQ(faulty_->signal_value(0), 1U);
  EXPECT_EQ(read(0), 7U);
}

TEST_F(FaultyTransportTest, FailsCallsWholly) {
  open({.fail = 1});
  testing::require_refusal([&] { put(7, 0); }, "put: to rank 0 failed (on purpose)");
  testing::require_refusal([&] { faulty_->raise(0, 1, 1); }, "failed (on purpose)");
  EXPECT_EQ(faulty_->signal_value(0), 0U);
}

TEST_F(FaultyTransportTest, ReportsALateFailureAtTheNextCall) {
  open({.delay = 1, .hold = std::chrono::hours(1)});
  put(7, 4096);  // far outside
  faulty_->park(faulty_->doorbell(), std::chrono::milliseconds(1));
  testing::require_refusal([&] { put(7, 0); }, "end past region 0 of rank 0");
}

TEST_F(FaultyTransportTest, HidesMappedMemory) {
  open({.hide_mapped = true});
  EXPECT_EQ(faulty_->mapped(0, region_.ref.slot), nullptr);
  put(7, 0);
  EXPECT_EQ(read(0), 7U);
}

TEST_F(FaultyTransportTest, ReordersThePutsOfACall) {
  open({.reorder = 1});
  std::vector<uint64_t> values(64);
  std::vector<Put> puts;
  for (uint64_t i = 0; i < values.size(); ++i) {
    values[i] = i;
    puts.push_back(
        {.source = &values[i], .bytes = 8, .region = region_.ref.slot, .signal = 0, .offset = 0}
    );
  }
  faulty_->put(0, puts);
  EXPECT_EQ(faulty_->signal_value(0), 64U);
  EXPECT_NE(read(0), 63U) << "the last put came last";  // the seed is fixed
}

TEST_F(FaultyTransportTest, RepeatsItselfWithTheSameSeed) {
  const auto fates = [this](uint64_t seed) {
    open({.seed = seed, .drop = 0.5});
    std::vector<bool> arrived;
    for (uint64_t i = 0; i < 64; ++i) {
      const uint64_t before = faulty_->signal_value(0);
      put(1, i);
      arrived.push_back(faulty_->signal_value(0) != before);
    }
    return arrived;
  };
  const auto first = fates(11);
  EXPECT_EQ(fates(11), first);
  EXPECT_NE(fates(12), first);
}

}  // namespace weft
