// SPDX-License-Identifier: Apache-2.0
// Rows that dispatch quantises on the way, by every format, and rows that are FP8 already, with
// their scales.
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

// Scales are as models of FP8 want them, beside sources and counts: by column with expert_strided.
// They come with a plan made before, and with plan and dispatch in one call of few tokens.
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

// Block formats, of rows that fill a warp's steps and of such that do not, of values with
// infinities and NaNs, also in plan and dispatch of one call.
TEST_P(GpuQuantisedRowsTest, AreOfBlockFormats) {
  const bool copies = GetParam();
  for (const int num_ranks : {1, 4}) {
    for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
      for (const Quantise kind : {Quantise::kMxfp8, Quantise::kNvfp4}) {
        for (const bool is_routed : {false, true}) {
          ExchangeSetup setup = gpu_setup(num_ranks, num_gpus());
          setup.hidden = is_routed ? 1312 : 7168;
          setup.max_tokens = 16;
          setup.copy_engines = copies;
          Case spec;
          spec.num_tokens.assign(static_cast<size_t>(num_ranks), 16);
          spec.num_tokens.back() = 13;
          spec.topk = 3;
          spec.layout = layout;
          spec.pad_multiple = layout == Layout::kRankMajor ? 1 : 8;
          spec.room = Room::kSpare;
          spec.calls = "dd";
          spec.is_routed = is_routed;
          spec.dtype = DType::kBFloat16;
          spec.quantise = kind;
          spec.global_scale = is_routed ? 0.0F : 2688 / 0x1p20F;
          spec.output = is_routed ? OutputMemory::kDirect : OutputMemory::kStaged;
          ASSERT_EQ(run_on_threads(setup, spec), "");
        }
      }
    }
  }
}

TEST_P(GpuQuantisedRowsTest, HaveNvfp4ScalesOfPowersOfTwo) {
  ExchangeSetup setup = gpu_setup(2, num_gpus());
  setup.hidden = 512;
  setup.copy_engines = GetParam();
  Case spec;
  spec.num_tokens = {setup.max_tokens, 5};
  spec.topk = 3;
  spec.calls = "d";
  spec.dtype = DType::kBFloat16;
  spec.quantise = Quantise::kNvfp4;
  spec.scale_rule = ScaleRule::kUe8m0;
  spec.global_scale = 448;
  ASSERT_EQ(run_on_threads(setup, spec), "");
}

// Blocks have fewer rows than a tile of scales, and more.
TEST_P(GpuQuantisedRowsTest, HaveScalesByColumnAndInTiles) {
  for (const ScaleLayout layout : {ScaleLayout::kByColumn, ScaleLayout::kInTiles}) {
    for (const Quantise kind : {Quantise::kE4M3, Quantise::kMxfp8, Quantise::kNvfp4}) {
      for (const int64_t rows : {100, 300}) {
        for (const bool is_routed : {false, true}) {
          ExchangeSetup setup = gpu_setup(2, num_gpus());
          setup.hidden = 384;
          setup.max_tokens = 100;
          setup.copy_engines = GetParam();
          Case spec;
          spec.num_tokens = {100, 60};
          spec.topk = 2;
          spec.layout = Layout::kExpertStrided;
          spec.pad_multiple = 4;
          spec.rows = rows;
          spec.calls = "dd";
          spec.is_routed = is_routed;
          spec.has_weights = false;
          spec.dtype = DType::kBFloat16;
          spec.quantise = kind;
          spec.asks_beside = true;
          spec.scale_layout = layout;
          ASSERT_EQ(run_on_threads(setup, spec), "");
        }
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
