// SPDX-License-Identifier: Apache-2.0
// FP8: rows that dispatch quantises on the way, and rows that are FP8 already, with their scales.
#include <gtest/gtest.h>

#include "gpu/gpu_test.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

class GpuQuantiseTest : public GpuTest {};

class GpuQuantisedRowsTest : public GpuParamTest<bool> {};

TEST_P(GpuQuantisedRowsTest, AreFp8WithTheirScales) {
  const bool copies = GetParam();
  for (const int num_ranks : {1, 2, 4}) {
    for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
      for (const Quantise kind : {Quantise::kE4M3, Quantise::kE5M2}) {
        ExchangeSetup setup = gpu_setup(num_ranks, num_gpus());
        setup.hidden = kind == Quantise::kE4M3 ? 384 : 128;
        setup.copy_engines = copies;
        Case spec;
        spec.num_tokens.assign(static_cast<size_t>(num_ranks), 60);
        spec.num_tokens.back() = 13;
        spec.topk = 3;
        spec.layout = layout;
        spec.pad_multiple = layout == Layout::kRankMajor ? 1 : 8;
        spec.has_plan_weights = false;
        spec.has_weights = false;
        spec.calls = "d";
        spec.dtype = DType::kBFloat16;
        spec.quantise = kind;
        spec.output = kind == Quantise::kE4M3 ? OutputMemory::kDirect : OutputMemory::kStaged;
        ASSERT_EQ(run_on_threads(setup, spec), "");
      }
    }
  }
}

// As models of FP8 want them, beside sources and counts: by column with expert_strided. With a plan
// of before, and with plan and dispatch in one call of few tokens.
TEST_P(GpuQuantisedRowsTest, HaveScalesByEveryRule) {
  const bool copies = GetParam();
  for (const Layout layout : {Layout::kExpertMajor, Layout::kExpertStrided}) {
    for (const ScaleRule rule : {ScaleRule::kClamped, ScaleRule::kPowerOfTwo, ScaleRule::kUe8m0}) {
      for (const bool is_routed : {false, true}) {
        ExchangeSetup setup = gpu_setup(4, num_gpus());
        setup.hidden = 512;
        setup.max_tokens = is_routed ? 16 : 64;
        setup.copy_engines = copies;
        Case spec;
        spec.num_tokens = {setup.max_tokens, 0, 13, 1};
        spec.topk = 3;
        spec.layout = layout;
        spec.pad_multiple = 8;
        spec.room = Room::kSpare;
        spec.calls = "dd";
        spec.is_routed = is_routed;
        spec.ignores_unknown = is_routed;
        spec.hole_fraction = 0.2;
        spec.dtype = DType::kBFloat16;
        spec.quantise = Quantise::kE4M3;
        spec.scale_rule = rule;
        spec.asks_beside = true;
        ASSERT_EQ(run_on_threads(setup, spec), "");
      }
    }
  }
}

// Without and with copy engines.
INSTANTIATE_TEST_SUITE_P(All, GpuQuantisedRowsTest, testing::Bool());

// [T, H] bytes with [T, H / 128] fp32 scales, as an fp8 model has them.
TEST_F(GpuQuantiseTest, CarriesFp8RowsAndTheirScales) {
  for (const Mover mover : movers_here()) {
    for (const int num_ranks : {1, 2, 4}) {
      ExchangeSetup setup = gpu_setup(num_ranks, num_gpus());
      setup.mover = mover;
      Case spec;
      spec.num_tokens.assign(static_cast<size_t>(num_ranks), 60);
      spec.topk = 3;
      spec.pad_multiple = 16;
      spec.calls = "dd";
      spec.dtype = DType::kByte;
      spec.byte_cols = 7168;
      spec.scale_cols = 56 * 4;
      spec.output = OutputMemory::kMixed;
      EXPECT_EQ(run_on_threads(setup, spec), "");
    }
  }
}

}  // namespace
}  // namespace weft::test
