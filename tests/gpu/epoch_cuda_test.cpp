// SPDX-License-Identifier: Apache-2.0
// Exchanges that live for billions of calls: numbers of calls come round in 32 bits, and nothing
// that was raised long ago is taken for new.
#include <gtest/gtest.h>

#include "gpu/epochs.hpp"
#include "gpu/fault_world.hpp"
#include "gpu/gpu_test.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

constexpr uint64_t kStep = uint64_t{1} << 28;

// Calls of many tokens, or of few, which raise only the first signals.
CaseData case_of(const ExchangeSetup& setup, bool is_large, uint64_t seed, bool is_routed = false) {
  Case spec;
  spec.seed = seed;
  spec.num_tokens.assign(static_cast<size_t>(setup.num_ranks), is_large ? setup.max_tokens : 2);
  spec.topk = 2;
  spec.dtype = DType::kBFloat16;
  spec.is_late = is_large;  // so that whoever does not wait takes what was there before
  spec.calls = "dcdc";
  spec.is_routed = is_routed;
  spec.room = is_routed ? Room::kSpare : Room::kExact;
  return make_case_data(setup, spec);
}

class GpuEpochTest : public GpuParamTest<int> {};

// With `is_routed` the first call of each case plans and dispatches.
void expect_right_beyond_32_bits(const ExchangeSetup& setup, bool is_routed = false) {
  std::vector<CaseData> large;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    large.push_back(case_of(setup, true, seed, is_routed));
  }
  const CaseData few = case_of(setup, false, 4, is_routed);
  // Large calls after 2^31 calls of silence and before and after the numbers come round; or after
  // 2^32, when all of a number's 32 bits are those of the large call before.
  const uint64_t second = is_routed ? 4 : 11;
  run_threads(setup.num_ranks, [&](const Group& group) {
    Exchange exchange = make_exchange(group, setup);
    EXPECT_EQ(run_cases(exchange, {&large[0], 1}, &group), "");
    for (uint64_t i = 2; i <= 20; ++i) {
      SCOPED_TRACE(i);
      group.barrier();
      set_epoch(exchange, i * kStep - 3);
      group.barrier();
      const CaseData& data = i == second ? large[1] : i == 20 ? large[2] : few;
      EXPECT_EQ(run_cases(exchange, {&few, 1}, &group), "");
      EXPECT_EQ(run_cases(exchange, {&data, 1}, &group), "");
    }
    group.barrier();
  });
}

TEST_P(GpuEpochTest, CallsAreRightBeyond32Bits) {
  for (const int64_t max_tokens : {60, 700}) {  // with eager rows and without
    ExchangeSetup setup = gpu_setup(GetParam(), num_gpus());
    setup.max_tokens = max_tokens;
    setup.hidden = 256;
    expect_right_beyond_32_bits(setup);
  }
}

TEST_P(GpuEpochTest, CallsThatPlanAndDispatchAreRightBeyond32Bits) {
  ExchangeSetup setup = gpu_setup(GetParam(), num_gpus());
  setup.max_tokens = 60;
  setup.hidden = 256;
  expect_right_beyond_32_bits(setup, true);
}

TEST_P(GpuEpochTest, CallsByCopyEnginesAreRightBeyond32Bits) {
  ExchangeSetup setup = gpu_setup(GetParam(), num_gpus());
  setup.copy_engines = true;
  setup.max_tokens = 300;
  setup.hidden = 256;
  expect_right_beyond_32_bits(setup);
}

// A plan may be used for ever. One of the other plans is made by the call whose number ends in 32
// zero bits, and the host hears of it all the same.
TEST_P(GpuEpochTest, APlanOutlivesThem) {
  const ExchangeSetup setup = gpu_setup(GetParam(), num_gpus());
  const CaseData few = case_of(setup, false, 1);
  run_threads(setup.num_ranks, [&](const Group& group) {
    Exchange exchange = make_exchange(group, setup);
    FaultRank own(exchange, few);
    own.make_plan();
    for (uint64_t i = 2; i <= 20; ++i) {
      group.barrier();
      set_epoch(exchange, i * kStep - 3);
      group.barrier();
      exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
      exchange.combine(*own.plan, own.combine_in, own.combine_out);
      const Plan another = exchange.plan(own.routing, own.options);
    }
    exchange.check();
    group.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(All, GpuEpochTest, testing::Values(2, 3));

}  // namespace
}  // namespace weft::test
