// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "core/gpu/devices.hpp"
#include "gpu/arithmetic_cases.hpp"

namespace weft::testing {
namespace {

class DeviceArithmeticTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const GpuList list = list_gpus();
    if (list.gpus.empty()) {
      GTEST_SKIP() << "no GPU: " << list.none_reason;
    }
  }
};

TEST_F(DeviceArithmeticTest, ConvertsHalvesToTheSameBitsAsTheHost) {
  const std::vector<HalfResult> results = half_results_cuda();
  for (uint32_t case_idx = 0; case_idx < results.size(); ++case_idx) {
    ASSERT_EQ(results[case_idx], half_result(case_idx)) << "case " << case_idx;
  }
}

TEST_F(DeviceArithmeticTest, ComputesTheSameSlotsAsTheHost) {
  const std::vector<SlotResult> results = slot_results_cuda();
  for (uint32_t case_idx = 0; case_idx < results.size(); ++case_idx) {
    ASSERT_EQ(results[case_idx], slot_result(case_idx)) << "case " << case_idx;
  }
}

}  // namespace
}  // namespace weft::testing
