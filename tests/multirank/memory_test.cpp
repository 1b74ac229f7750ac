// SPDX-License-Identifier: Apache-2.0
// A thousand calls of changing shape leave the process as big as they found it. What the kernel
// gives and takes back meanwhile is chance: a leak grows in every thousand, so one that does not is
// enough.
#include <gtest/gtest.h>

#include <array>

#include "support/process_memory.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int kMostThousands = kIsSanitized ? 1 : 6;

class MemoryTest : public testing::TestWithParam<const char*> {};

TEST_P(MemoryTest, DoesNotGrowOverAThousandCallsOfChangingShape) {
  ExchangeSetup setup;
  setup.transport = GetParam();
  setup.max_tokens = 300;
  setup.hidden = 512;  // staging and buffers of many size classes
  std::vector<CaseData> cases;
  for (uint64_t seed = 900; seed < 920; ++seed) {
    Case spec = random_case(setup, seed);
    spec.output = seed % 2 == 0 ? OutputMemory::kDirect : OutputMemory::kStaged;
    cases.push_back(make_case_data(setup, spec));
  }
  ProcessMemory before;
  ProcessMemory between;  // before the last thousand
  ProcessMemory after;
  std::array<Footprint, 2> footprints;
  int64_t num_calls = 0;
  run_threads(setup.num_ranks, [&](const Group& group) {
    Exchange exchange(group, setup.config());
    const auto run_all = [&] {
      for (const CaseData& data : cases) {
        EXPECT_EQ(run_cases(exchange, {&data, 1}), "");
      }
    };
    const auto calls = [&] {
      const ExchangeStats stats = exchange.stats();
      return stats.num_plans + stats.num_dispatches + stats.num_combines;
    };
    const auto note = [&](ProcessMemory& memory, Footprint& footprint) {
      group.barrier();
      if (group.rank() == 0) {
        memory = measure_process_memory();
        footprint = exchange.footprint();
      }
      group.barrier();
    };
    run_all();
    run_all();
    note(before, footprints[0]);
    const int64_t calls_before = calls();
    for (int i = 0; i < kMostThousands; ++i) {
      note(between, footprints[1]);
      const int64_t calls_between = calls();
      while (calls() - calls_between < 1000) {
        run_all();
      }
      note(after, footprints[1]);
      if (after.resident_bytes <= between.resident_bytes + kMiB) {
        break;
      }
    }
    if (group.rank() == 0) {
      num_calls = calls() - calls_before;
    }
  });
  EXPECT_GE(num_calls, 1000);
  EXPECT_EQ(footprints[1].control_bytes, footprints[0].control_bytes);
  EXPECT_EQ(footprints[1].staging_bytes, footprints[0].staging_bytes);
  EXPECT_EQ(footprints[1].buffer_bytes, footprints[0].buffer_bytes);
  EXPECT_LE(footprints[1].pooled_bytes, footprints[0].pooled_bytes + kMiB);
  EXPECT_LE(after.num_shared_mappings, before.num_shared_mappings + 4);
  EXPECT_LE(after.num_descriptors, before.num_descriptors + 4);
  if (!kIsSanitized) {
    EXPECT_LE(after.num_mappings, before.num_mappings + 16);
    EXPECT_LE(after.resident_bytes, between.resident_bytes + kMiB);
  }
}

TEST_P(MemoryTest, IsGivenBackWhenExchangesEnd) {
  ExchangeSetup setup;
  setup.transport = GetParam();
  Case spec;
  spec.num_tokens = {30, 64};
  const std::vector<CaseData> cases = {make_case_data(setup, spec)};
  EXPECT_EQ(run_cases_on_threads(cases), "");
  const ProcessMemory before = measure_process_memory();
  for (int round = 0; round < 30; ++round) {
    EXPECT_EQ(run_cases_on_threads(cases), "");
  }
  const ProcessMemory after = measure_process_memory();
  EXPECT_EQ(after.num_shared_mappings, 0);
  EXPECT_EQ(after.num_descriptors, before.num_descriptors);
  if (!kIsSanitized) {
    EXPECT_LE(after.resident_bytes, before.resident_bytes + 4 * kMiB);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    MemoryTest,
    testing::Values("loopback", "shm"),
    [](const testing::TestParamInfo<const char*>& param) { return param.param; }
);

}  // namespace
}  // namespace weft::test
