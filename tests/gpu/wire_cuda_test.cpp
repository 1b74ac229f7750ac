// SPDX-License-Identifier: Apache-2.0
// Sums that travel coded (CombineInput::wire) between GPUs have the bits of the reference, in one
// domain and in several.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "gpu/gpu_test.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

constexpr Wire kWires[] = {Wire::kFp8, Wire::kLogFmt10};

// Combines in a row, so that both parities of eager rows are used, between others.
std::vector<CaseData> wire_cases(const ExchangeSetup& setup, Wire wire, uint64_t seed) {
  std::vector<CaseData> cases;
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
    for (const CombineScale scale :
         {CombineScale::kNone, CombineScale::kPlanWeights, CombineScale::kSourceWeights}) {
      Case spec = random_case(setup, ++seed);
      spec.dtype = DType::kBFloat16;
      spec.calls = cases.size() % 2 == 0 ? "cdc" : "cc";
      spec.wire = wire;
      spec.scale = scale;
      spec.has_plan_weights = true;
      set_layout(spec, layout);
      cases.push_back(make_case_data(setup, spec));
    }
  }
  return cases;
}

class GpuWireTest : public GpuParamTest<int> {};

// Few tokens, whose sums go among the eager rows, and many; rows of one group, of a number that no
// team of warps divides, and long ones.
TEST_P(GpuWireTest, EqualsTheReference) {
  constexpr std::pair<int64_t, int64_t> kSizes[] = {{128, 300}, {640, 90}, {640, 7}, {7168, 7}};
  FailureCount failures;
  for (const int gpus : gpu_counts()) {
    for (const auto& [hidden, max_tokens] : kSizes) {
      ExchangeSetup setup = gpu_setup(GetParam(), gpus);
      setup.hidden = hidden;
      setup.max_tokens = max_tokens;
      setup.max_topk = 6;
      setup.num_sms = max_tokens == 90 ? 3 : 0;
      setup.has_own_stream = max_tokens == 7;
      for (const Wire wire : kWires) {
        const auto seed = static_cast<uint64_t>(hidden + 1000 * max_tokens);
        failures.add(run_cases_on_threads(wire_cases(setup, wire, seed)));
        if (failures.are_too_many()) {
          return;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuWireTest, testing::Values(1, 2, 3, 8));

class GpuWireDomainsTest : public GpuParamTest<std::vector<int>> {};

TEST_P(GpuWireDomainsTest, EqualsTheReference) {
  FailureCount failures;
  for (const char* transport :
       {"loopback", "faulty:loopback?delay=0.05&reorder=0.5&hold_us=100&hide_mapped=1"}) {
    for (const int64_t hidden : {128, 896}) {
      ExchangeSetup setup = gpu_setup(static_cast<int>(GetParam().size()), num_gpus());
      setup.domain_of = GetParam();
      setup.transport = transport;
      setup.hidden = hidden;
      setup.num_experts = 2 * setup.num_ranks;
      setup.max_topk = 6;
      setup.max_tokens = 100;
      for (const Wire wire : kWires) {
        failures.add(run_cases_on_threads(wire_cases(setup, wire, 70'000)));
        if (failures.are_too_many()) {
          return;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    GpuWireDomainsTest,
    testing::Values(
        std::vector{0, 0, 1, 1}, std::vector{0, 1, 0, 1, 1}, std::vector{0, 1, 1}, std::vector{0, 1}
    )
);

// Copy engines carry rows of dispatch; coded sums go as usual, on all ranks.
TEST_F(GpuTest, CodedSumsDoNotGoByCopyEngines) {
  ExchangeSetup setup = gpu_setup(2, num_gpus());
  setup.hidden = 256;
  setup.copy_engines = true;
  Case spec;
  spec.num_tokens = {30, 40};
  spec.dtype = DType::kBFloat16;
  for (const Wire wire : {Wire::kNone, Wire::kFp8}) {
    spec.wire = wire;
    const CaseData data = make_case_data(setup, spec);
    run_threads(2, [&](const Group& group) {
      Exchange exchange = make_exchange(group, setup);
      EXPECT_EQ(run_cases(exchange, {&data, 1}, &group), "");
      EXPECT_EQ(exchange.stats().num_copied, wire == Wire::kNone ? 2 : 1);
    });
  }
}

}  // namespace
}  // namespace weft::test
