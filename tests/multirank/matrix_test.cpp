// SPDX-License-Identifier: Apache-2.0
// One body over transport x ranks x dtype x layout: some random small cases each, several of them
// alive at once on one exchange.
#include <gtest/gtest.h>

#include <algorithm>

#include "multirank/worlds.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

using Parameters = std::tuple<std::string, int, DType, Layout>;

class MatrixTest : public testing::TestWithParam<Parameters> {};

TEST_P(MatrixTest, GivesTheBitsOfTheReference) {
  const auto& [transport, num_ranks, dtype, layout] = GetParam();
  if (const std::string reason = obstacle(transport); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  const uint64_t seed = static_cast<uint64_t>(num_ranks) * 1000 +
                        static_cast<uint64_t>(dtype) * 100 + static_cast<uint64_t>(layout) * 10;
  ExchangeSetup setup = random_setup(seed);
  setup.transport = transport;
  setup.num_ranks = num_ranks;
  setup.num_experts = 3 * num_ranks;
  setup.max_tokens = 70;
  setup.max_topk = 5;
  setup.num_threads = num_ranks < 4 ? 2 : 1;
  std::vector<CaseData> cases;
  for (uint64_t i = 0; i < 4; ++i) {
    Case spec = random_case(setup, seed + i);
    spec.dtype = dtype;
    spec.layout = layout;
    if (dtype == DType::kByte) {
      spec.calls = "dd";
    }
    if (layout == Layout::kRankMajor) {
      spec.pad_multiple = 1;
      spec.scale = CombineScale::kNone;
    }
    cases.push_back(make_case_data(setup, spec));
  }
  EXPECT_EQ(run_cases_on_threads(cases), "");
}

std::string test_name(const testing::TestParamInfo<Parameters>& info) {
  const auto& [transport, num_ranks, dtype, layout] = info.param;
  std::string name = transport + "_" + std::to_string(num_ranks) + "_" +
                     std::string(dtype_name(dtype)) + "_" + std::string(layout_name(layout));
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(
    All,
    MatrixTest,
    testing::Combine(
        testing::Values("loopback", "shm"),
        testing::Values(1, 2, 3, 4, 8),
        testing::Values(DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kByte),
        testing::Values(Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided)
    ),
    test_name
);

INSTANTIATE_TEST_SUITE_P(
    Fabric,
    MatrixTest,
    testing::Combine(
        testing::Values("ofi:tcp", "ofi:shm"),
        testing::Values(2, 3, 4),
        testing::Values(DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kByte),
        testing::Values(Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided)
    ),
    test_name
);

}  // namespace
}  // namespace weft::test
