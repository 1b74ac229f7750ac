// SPDX-License-Identifier: Apache-2.0
// Plans with replicas (PlanOptions::balance) are refused on GPUs, by all ranks.
#include <gtest/gtest.h>

#include "gpu/gpu_test.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

class GpuBalanceTest : public GpuTest {
 protected:
  static void expect_refusal(const ExchangeSetup& setup) {
    Case spec;
    spec.num_tokens = {5, 5};
    spec.calls = "";
    spec.balance = {.replicas = 1};
    const std::string failures = run_on_threads(setup, spec);
    const std::string text = "plan: balance with 1 replicas on a GPU";
    const size_t first = failures.find(text);
    EXPECT_NE(first, std::string::npos) << failures;
    EXPECT_NE(failures.find(text, first + 1), std::string::npos) << failures;
  }
};

TEST_F(GpuBalanceTest, IsRefusedOnAllRanks) {
  expect_refusal(gpu_setup(2, num_gpus()));
}

TEST_F(GpuBalanceTest, IsRefusedOnAllRanksOfSeveralHosts) {
  ExchangeSetup setup = gpu_setup(2, num_gpus());
  setup.domain_of = {0, 1};
  expect_refusal(setup);
}

}  // namespace
}  // namespace weft::test
