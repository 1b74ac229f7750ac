// SPDX-License-Identifier: Apache-2.0
// How fast does one thread copy rows, past the caches or through them, and sum them?
#include <benchmark/benchmark.h>

#include <cstddef>
#include <vector>

#include "core/copy.hpp"
#include "cpu/combine/row_sum.hpp"

namespace {

using namespace weft;

constexpr int64_t kMemoryBytes = 32 << 20;

using CopyFunction = void (*)(void* to, const void* from, uint64_t bytes);

void copy_rows(benchmark::State& state, CopyFunction copy) {
  const int64_t row_bytes = state.range(0);
  const int64_t num_rows = kMemoryBytes / row_bytes;
  const std::vector<std::byte> from(static_cast<size_t>(kMemoryBytes), std::byte{1});
  std::vector<std::byte> to(static_cast<size_t>(kMemoryBytes));
  for ([[maybe_unused]] const auto iteration : state) {
    for (int64_t row = 0; row < num_rows; ++row) {
      // Each row to another end of the memory, as rows that are grouped by expert.
      const int64_t place = row * 13 % num_rows;
      copy(
          to.data() + place * row_bytes,
          from.data() + row * row_bytes,
          static_cast<uint64_t>(row_bytes)
      );
    }
    streaming_fence();
  }
  state.SetBytesProcessed(state.iterations() * num_rows * row_bytes);
}

void sum_of_rows(benchmark::State& state, DType dtype) {
  const int64_t num_terms = state.range(0);
  constexpr int64_t kHidden = 2048;
  const int64_t row_bytes = kHidden * dtype_bytes(dtype);
  const std::vector<std::byte> rows(static_cast<size_t>(kMemoryBytes));
  std::vector<std::byte> out(static_cast<size_t>(row_bytes));
  const int64_t num_sums = kMemoryBytes / row_bytes / num_terms;
  RowGroups terms;
  terms.rows.resize(static_cast<size_t>(num_terms));
  terms.group_ends = {terms.rows.size()};
  for ([[maybe_unused]] const auto iteration : state) {
    for (int64_t sum = 0; sum < num_sums; ++sum) {
      for (int64_t term = 0; term < num_terms; ++term) {
        terms.rows[static_cast<size_t>(term)] = rows.data() + (term * num_sums + sum) * row_bytes;
      }
      sum_groups(out.data(), terms, dtype, kHidden);
    }
    benchmark::DoNotOptimize(out.data());
  }
  state.SetBytesProcessed(state.iterations() * num_sums * num_terms * row_bytes);  // read
}

void row_sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgName("row_bytes")->Arg(512)->Arg(4096)->Arg(14336);
}

BENCHMARK_CAPTURE(copy_rows, through_caches, copy_bytes)->Apply(row_sizes);
BENCHMARK_CAPTURE(copy_rows, past_caches, copy_streaming)->Apply(row_sizes);
BENCHMARK_CAPTURE(sum_of_rows, bf16, DType::kBFloat16)->ArgName("rows")->Arg(1)->Arg(2)->Arg(4);
BENCHMARK_CAPTURE(sum_of_rows, fp32, DType::kFloat32)->ArgName("rows")->Arg(1)->Arg(2)->Arg(4);

}  // namespace
