// SPDX-License-Identifier: Apache-2.0
// Combine on CPU threads, the adjoint of dispatch_cpu.cpp. Previous in the data flow:
// combine_call.cpp.
//
// Each worker takes turns: pre-reduce a chunk for every token rank, add up what this domain's ranks
// have for tokens of others, sum the tokens that are complete.
#include "cpu/combine/forward.hpp"
#include "cpu/combine/reduce.hpp"
#include "cpu/combine/sum.hpp"

namespace weft {
namespace {

// Until one of the two has something to do or everything is claimed.
void wait(
    const CpuRank& rank, const CpuCall& call, const CombineCarry& carry, const CombineSum& sum
) {
  const auto ready = [&] {
    return carry.has_ready() || sum.has_ready() || (carry.is_claimed() && sum.is_claimed());
  };
  const auto missing = [&] {
    std::vector<Missing> late;
    carry.add_missing(late);
    sum.add_missing(late);
    return late;
  };
  rank.waiter.until(
      {.op = "combine", .call = call.number, .what = "partial sums"},
      ready,
      missing,
      [&] { return rank.workers.is_stopping(); }
  );
}

}  // namespace

void combine_cpu(
    const CpuRank& rank, const CpuCall& call, const CombineInput& in, const CombineOutput& out
) {
  CombineReduce reduce(rank, call, in);
  if (in.scale == CombineScale::kSourceWeights) {
    reduce.swap_source_weights();
  }
  CombineCarry carry(rank, call, in);
  CombineSum sum(rank, call, in, out);
  std::atomic<int64_t> next_unit = 0;
  rank.workers.run([&](int) {
    CombineReduce::Scratch reduce_scratch;
    CombineCarry::Scratch carry_scratch;
    CombineSum::Scratch sum_scratch;
    while (!rank.workers.is_stopping()) {
      const int64_t unit = next_unit.fetch_add(1, std::memory_order_relaxed);
      if (unit < reduce.num_units()) {
        reduce.run(unit, reduce_scratch);
      }
      const bool has_carried = carry.run_ready(carry_scratch);
      if (sum.run_ready(sum_scratch) || has_carried || unit < reduce.num_units()) {
        continue;
      }
      if (carry.is_claimed() && sum.is_claimed()) {
        return;
      }
      wait(rank, call, carry, sum);
    }
  });
  carry.settle();
  sum.settle();
  sum.release_rows();
  reduce.wait_for_readers();
}

}  // namespace weft
