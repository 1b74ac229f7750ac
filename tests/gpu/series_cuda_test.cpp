// SPDX-License-Identifier: Apache-2.0
// Exchanges that follow each other get each other's memory: what one leaves there must not reach
// the next. Direct and staged ones need regions of other numbers and sizes, so their addresses
// change places.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "gpu/gpu_test.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

class GpuSeriesTest : public GpuTest {
 protected:
  // WEFT_GPU_SERIES says how many exchanges.
  static void run_series(const std::vector<int>& num_gpus, uint64_t otherwise) {
    FailureCount failures;
    const uint64_t count = number_from_env("WEFT_GPU_SERIES", otherwise);
    for (uint64_t i = 0; i < count && !failures.are_too_many(); ++i) {
      ExchangeSetup setup = gpu_setup(4, num_gpus[i / 2 % num_gpus.size()]);
      setup.mover = mover_in_turn(i / 4);
      Case spec;
      spec.seed = i + 1;
      spec.num_tokens = {40, 40, 40, 17};
      spec.topk = 3;
      spec.output = i % 2 == 0 ? OutputMemory::kDirect : OutputMemory::kStaged;
      const std::string text = run_on_threads(setup, spec);
      failures.add(text.empty() ? text : fmt::format("exchange {}: {}", i, text));
    }
  }
};

TEST_F(GpuSeriesTest, HundredsOfExchangesOnOneGpu) {
  run_series({1}, 400);
}

TEST_F(GpuSeriesTest, OnChangingNumbersOfGpus) {
  if (num_gpus() < 2) {
    GTEST_SKIP() << "one GPU only";
  }
  run_series({1, 2, num_gpus()}, 60);
}

}  // namespace
}  // namespace weft::test
