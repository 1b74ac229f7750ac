// SPDX-License-Identifier: Apache-2.0
// Ranks as processes, over shared memory.
#include <gtest/gtest.h>

#include "support/run_case.hpp"

namespace weft::test {
namespace {

class ProcessesTest : public testing::TestWithParam<int> {};

TEST_P(ProcessesTest, GiveTheBitsOfTheReference) {
  ExchangeSetup setup;
  setup.num_ranks = GetParam();
  setup.transport = "shm";
  setup.num_threads = 2;
  setup.num_experts = 3 * setup.num_ranks;
  std::vector<CaseData> cases;
  for (uint64_t seed = 500; seed < 508; ++seed) {
    Case spec = random_case(setup, seed);
    spec.is_late = seed % 4 == 0;
    cases.push_back(make_case_data(setup, spec));
  }
  const std::vector<int> all_well(static_cast<size_t>(setup.num_ranks), 0);
  EXPECT_EQ(run_cases_on_processes(cases), all_well);
}

INSTANTIATE_TEST_SUITE_P(All, ProcessesTest, testing::Values(1, 2, 4));

}  // namespace
}  // namespace weft::test
