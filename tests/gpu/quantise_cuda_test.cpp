// SPDX-License-Identifier: Apache-2.0
// FP8: rows that dispatch quantises on the way, and rows that are FP8 already, with their scales.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "gpu/gpu_test.hpp"
#include "gpu/quantise_rows.hpp"
#include "plan/plan_data.hpp"
#include "support/case_memory.hpp"
#include "support/compare.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

class GpuQuantiseTest : public GpuTest {};

// Rows and scales of one receiver: each arrival's in all its slots, zeros in padding.
struct Fp8Rows {
  Matrix rows;
  Matrix scales;
};

Fp8Rows expected_rows(
    Quantise kind, const CaseData& data, const std::vector<Matrix>& x, size_t to
) {
  const int64_t hidden = data.setup.hidden;
  const PlanData& plan = contents_of(data.plans[to]);
  Fp8Rows out = {
      Matrix(DType::kByte, plan.num_rows, hidden),
      Matrix(DType::kFloat32, plan.num_rows, hidden / 128)};
  const auto row_at = [&](int64_t slot) { return out.rows.as<std::byte>() + slot * hidden; };
  const auto scales_at = [&](int64_t slot) { return out.scales.as<float>() + slot * hidden / 128; };
  for (const auto& [begin, end] : plan.padding) {
    for (int64_t slot = begin; slot < end; ++slot) {
      std::memset(row_at(slot), 0, static_cast<size_t>(hidden));
      std::fill_n(scales_at(slot), hidden / 128, 0.0F);
    }
  }
  for (size_t from = 0; from < data.plans.size(); ++from) {
    const Arrivals& arrivals = contents_of(data.plans[from]).sent[to];
    for (int64_t i = 0; i < arrivals.size(); ++i) {
      const int64_t token = arrivals.token[static_cast<size_t>(i)];
      const QuantisedRow row =
          quantise_on_host(kind, x[from].as<uint16_t>() + token * hidden, hidden);
      for (const int32_t slot : arrivals.slots(i)) {
        std::memcpy(row_at(slot), row.bytes.data(), row.bytes.size());
        std::copy(row.scales.begin(), row.scales.end(), scales_at(slot));
      }
    }
  }
  return out;
}

// Finite, with a group of zeros.
Matrix tokens_of(const CaseData& data, int rank) {
  RandomSource random(static_cast<uint64_t>(rank) + 5);
  const int64_t num_tokens = data.spec.num_tokens[static_cast<size_t>(rank)];
  Matrix x = random_values(DType::kBFloat16, num_tokens, data.setup.hidden, random);
  std::fill_n(x.as<uint16_t>(), num_tokens > 0 ? 128 : 0, uint16_t{0});
  return x;
}

void expect_quantised(const ExchangeSetup& setup, const Case& spec, Quantise kind) {
  const CaseData data = make_case_data(setup, spec);
  std::vector<Matrix> x;
  for (int rank = 0; rank < setup.num_ranks; ++rank) {
    x.push_back(tokens_of(data, rank));
  }
  run_threads(setup.num_ranks, [&](const Group& group) {
    const auto rank = static_cast<size_t>(group.rank());
    const Fp8Rows expected = expected_rows(kind, data, x, rank);
    Exchange exchange(group, setup.config(group.rank()));
    CaseMemory memory(exchange);
    const auto& idx = memory.add(data.routing[rank].topk_idx);
    const auto& tokens = memory.add(x[rank]);
    const bool is_direct = spec.output == OutputMemory::kDirect;
    const auto& rows = memory.add_output(expected.rows, is_direct);
    const auto& scales = memory.add_output(expected.scales, is_direct);
    memory.upload();
    const Plan plan = exchange.plan({.topk_idx = idx.tensor()}, data.routing[rank].options);
    CallOptions call;
    call.copy_engines = setup.copy_engines;
    exchange.dispatch(
        plan,
        {.x = tokens.tensor(), .quantise = kind},
        {.rows = rows.tensor(), .scales = scales.tensor()},
        call
    );
    memory.download();
    const std::string text = describe(setup, spec);
    EXPECT_EQ(first_difference("scales", scales.result().view(), expected.scales.view()), "")
        << "rank " << rank << " " << text;
    EXPECT_EQ(first_difference("rows", rows.result().view(), expected.rows.view()), "")
        << "rank " << rank << " " << text;
    EXPECT_TRUE(rows.result().has_guards_untouched());
    EXPECT_TRUE(scales.result().has_guards_untouched());
    group.barrier();
  });
}

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
        spec.calls = "";
        spec.output = kind == Quantise::kE4M3 ? OutputMemory::kDirect : OutputMemory::kStaged;
        expect_quantised(setup, spec, kind);
        if (HasFailure()) {
          return;
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
