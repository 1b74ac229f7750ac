// SPDX-License-Identifier: Apache-2.0
// Exchanges and buffers that come, live side by side and go; what they count.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "support/errors.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

class LifeTest : public testing::TestWithParam<const char*> {
 protected:
  LifeTest() {
    setup_.transport = GetParam();
    spec_.num_tokens = {30, 64};
  }
  ExchangeSetup setup_;
  Case spec_;
};

TEST_P(LifeTest, SeveralExchangesOfOneGroupDoNotDisturbEachOther) {
  ExchangeSetup other = setup_;
  other.hidden = 128;
  other.transport = "shm";
  other.num_threads = 2;
  const std::vector<CaseData> a = {make_case_data(setup_, spec_)};
  const std::vector<CaseData> b = {make_case_data(other, spec_)};
  run_threads(2, [&](const Group& group) {
    Exchange first(group, setup_.config());
    Exchange second(group, other.config());
    for (int round = 0; round < 5; ++round) {
      EXPECT_EQ(run_cases(first, a), "");
      EXPECT_EQ(run_cases(second, b), "");
    }
  });
}

TEST_P(LifeTest, ExchangesMayFollowEachOther) {
  const std::vector<CaseData> cases = {make_case_data(setup_, spec_)};
  run_threads(2, [&](const Group& group) {
    for (int round = 0; round < 20; ++round) {
      Exchange exchange(group, setup_.config());
      EXPECT_EQ(run_cases(exchange, cases), "");
    }
  });
}

TEST_P(LifeTest, AnExchangeMayMove) {
  const std::vector<CaseData> cases = {make_case_data(setup_, spec_)};
  run_threads(2, [&](const Group& group) {
    Exchange first(group, setup_.config());
    Exchange second = std::move(first);
    EXPECT_EQ(run_cases(second, cases), "");
    first = std::move(second);
    EXPECT_EQ(run_cases(first, cases), "");
  });
}

TEST_P(LifeTest, ABufferOutlivesItsExchange) {
  const CaseData data = make_case_data(setup_, spec_);
  run_threads(2, [&](const Group& group) {
    const auto rank = static_cast<size_t>(group.rank());
    const RankCall& call = data.calls[0][rank];
    const ConstTensor expected = call.rows.view();
    std::optional<Exchange> exchange(std::in_place, group, setup_.config());
    const Plan plan = exchange->plan(data.routing[rank].routing(), data.routing[rank].options);
    const Buffer rows = exchange->allocate(expected.rows, expected.cols, expected.dtype);
    exchange->dispatch(plan, {.x = call.x.view()}, {.rows = rows.tensor()});
    exchange.reset();
    const Buffer copy = rows;
    EXPECT_EQ(
        std::memcmp(copy.tensor().data, expected.data, static_cast<size_t>(expected.num_bytes())), 0
    );
    std::memset(copy.tensor().data, 1, static_cast<size_t>(expected.num_bytes()));
  });
}

TEST_P(LifeTest, CountsCallsAndMemory) {
  const std::vector<CaseData> cases = {make_case_data(setup_, spec_)};
  run_threads(2, [&](const Group& group) {
    Exchange exchange(group, setup_.config());
    for (int round = 0; round < 3; ++round) {
      EXPECT_EQ(run_cases(exchange, cases), "");
    }
    const ExchangeStats stats = exchange.stats();
    EXPECT_EQ(stats.num_plans, 3);
    EXPECT_EQ(stats.num_dispatches, 3);
    EXPECT_EQ(stats.num_combines, 3);
    EXPECT_EQ(stats.wait_seconds.size(), 2U);
    EXPECT_EQ(stats.wait_seconds[static_cast<size_t>(group.rank())], 0);
    EXPECT_GT(exchange.footprint().control_bytes, 0);
    EXPECT_EQ(exchange.footprint().buffer_bytes, 0);
    EXPECT_GT(exchange.footprint().pooled_bytes, 0);
    const Buffer buffer = exchange.allocate(100, 1000, DType::kFloat32);
    EXPECT_GE(exchange.footprint().buffer_bytes, 400'000);
    exchange.release_pooled();
    EXPECT_EQ(exchange.footprint().pooled_bytes, 0);
    EXPECT_EQ(run_cases(exchange, cases), "");
  });
}

// A slow rank is named by the time that the other has waited for it.
TEST_P(LifeTest, AddsWhatCallsHaveWaited) {
  const std::vector<CaseData> cases = {make_case_data(setup_, spec_)};
  run_threads(2, [&](const Group& group) {
    Exchange exchange(group, setup_.config());
    EXPECT_EQ(run_cases(exchange, cases), "");
    std::array<int64_t, 2> waited = {7, 7};
    Tensor sums = {reinterpret_cast<std::byte*>(waited.data()), DType::kInt64, 1, 2};
    exchange.add_waits(sums, -1);
    group.barrier();
    if (group.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    EXPECT_EQ(run_cases(exchange, cases), "");
    exchange.add_waits(sums, 1);
    EXPECT_EQ(waited[static_cast<size_t>(group.rank())], 7);
    EXPECT_GE(waited[static_cast<size_t>(1 - group.rank())], 7);
    if (group.rank() == 0) {
      EXPECT_GT(waited[1], 25'000);
    }
    sums.cols = 1;
    EXPECT_EQ(
        text_of(thrown_by([&] { exchange.add_waits(sums, 1); })),
        fmt::format(
            "add_waits: sums has shape [1, 1] (expected [1, 2]) [rank {}/2, {}]",
            group.rank(),
            GetParam()
        )
    );
  });
}

TEST_P(LifeTest, ResolvesAutomaticSettings) {
  ExchangeSetup automatic = setup_;
  automatic.transport = "auto";
  automatic.num_threads = 0;
  run_threads(2, [&](const Group& group) {
    const Exchange exchange(group, automatic.config());
    EXPECT_EQ(exchange.config().transport, "loopback");
    EXPECT_GE(exchange.config().num_threads, 1);
    EXPECT_EQ(exchange.rank(), group.rank());
    EXPECT_EQ(exchange.num_ranks(), 2);
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    LifeTest,
    testing::Values("loopback", "shm"),
    [](const testing::TestParamInfo<const char*>& param) { return param.param; }
);

}  // namespace
}  // namespace weft::test
