// SPDX-License-Identifier: Apache-2.0
// Sums in the order of a token's choices on GPUs (SumOrder::kTopk): the bits of the reference, so
// those of the CPU, for every number of ranks; and what several hosts refuse.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>

#include "gpu/gpu_test.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

// Random cases of every dtype, of which every other plan has a row budget.
std::vector<CaseData> topk_cases(const ExchangeSetup& setup, CombineScale scale, Layout layout) {
  std::vector<CaseData> cases;
  uint64_t seed = static_cast<uint64_t>(setup.num_ranks) * 100 + static_cast<uint64_t>(scale);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    Case spec = random_case(setup, ++seed);
    spec.dtype = dtype;
    spec.layout = layout;
    spec.order = SumOrder::kTopk;
    spec.scale = scale;
    spec.has_plan_weights = true;
    spec.skips_source_weights =
        scale == CombineScale::kSourceWeights && spec.index != IndexKind::kMap;
    spec.calls = "dccdc";
    cases.push_back(make_case_data(setup, spec));
  }
  return cases;
}

class GpuSumOrderTest : public GpuParamTest<int> {
 protected:
  void run_all(int gpus) {
    FailureCount failures;
    ExchangeSetup setup = gpu_setup(GetParam(), gpus);
    setup.num_experts = 3 * setup.num_ranks;
    setup.max_topk = 6;
    for (const int64_t tokens : {70, 600}) {  // a chunk is one token, or four
      for (const CombineScale scale :
           {CombineScale::kNone, CombineScale::kPlanWeights, CombineScale::kSourceWeights}) {
        for (const Layout layout : {Layout::kExpertMajor, Layout::kExpertStrided}) {
          setup.max_tokens = tokens;
          setup.hidden = tokens == 70 ? 56 : 2072;
          setup.num_sms = tokens == 70 ? 0 : 8;
          setup.has_own_stream = !setup.has_own_stream;
          failures.add(run_cases_on_threads(topk_cases(setup, scale, layout)));
          if (failures.are_too_many()) {
            return;
          }
        }
      }
    }
  }
};

TEST_P(GpuSumOrderTest, GivesTheBitsOfTheReferenceOnOneGpu) {
  run_all(1);
}

TEST_P(GpuSumOrderTest, GivesTheBitsOfTheReferenceOnAllGpus) {
  if (num_gpus() == 1) {
    GTEST_SKIP() << "one GPU only";
  }
  run_all(num_gpus());
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuSumOrderTest, testing::Values(1, 2, 3, 4));

// Copy engines bring one row an arrival: such a combine goes as usual, with the bits of the
// reference.
using GpuSumOrderByCopiesTest = GpuTest;
TEST_F(GpuSumOrderByCopiesTest, GivesTheBitsOfTheReference) {
  ExchangeSetup setup = gpu_setup(2, num_gpus());
  setup.num_experts = 6;
  setup.max_topk = 6;
  setup.max_tokens = 200;
  setup.copy_engines = true;
  EXPECT_EQ(
      run_cases_on_threads(topk_cases(setup, CombineScale::kPlanWeights, Layout::kExpertMajor)), ""
  );
}

using GpuSumOrderBetweenHostsTest = GpuTest;
TEST_F(GpuSumOrderBetweenHostsTest, IsRefusedOnAllRanks) {
  ExchangeSetup setup = gpu_setup(2, num_gpus());
  setup.domain_of = {0, 1};
  Case spec;
  spec.num_tokens = {5, 5};
  spec.calls = "";
  spec.order = SumOrder::kTopk;
  const std::string failures = run_on_threads(setup, spec);
  const std::string text = "plan: order = topk among GPUs of several hosts";
  const size_t first = failures.find(text);
  EXPECT_NE(first, std::string::npos) << failures;
  EXPECT_NE(failures.find(text, first + 1), std::string::npos) << failures;
}

}  // namespace
}  // namespace weft::test
