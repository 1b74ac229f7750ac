// SPDX-License-Identifier: Apache-2.0
// Combine on CPU threads, the adjoint of dispatch_cpu.cpp. Previous in the data flow:
// combine_call.cpp.
//
// Each worker takes turns: pre-reduce a chunk for every token rank, sum the tokens that are
// complete.
#include "exchange/combine_reduce.hpp"
#include "exchange/combine_sum.hpp"

namespace weft {

void combine_cpu(
    const CpuRank& rank, const CpuCall& call, const CombineInput& in, const CombineOutput& out
) {
  CombineReduce reduce(rank, call, in);
  if (in.scale == CombineScale::kSourceWeights) {
    reduce.swap_source_weights();
  }
  CombineSum sum(rank, call, in, out);
  std::atomic<int64_t> next_unit = 0;
  rank.workers.run([&](int) {
    CombineReduce::Scratch reduce_scratch;
    CombineSum::Scratch sum_scratch;
    while (!rank.workers.is_stopping()) {
      const int64_t unit = next_unit.fetch_add(1, std::memory_order_relaxed);
      if (unit < reduce.num_units()) {
        reduce.run(unit, reduce_scratch);
      }
      if (sum.run_ready(sum_scratch) || unit < reduce.num_units()) {
        continue;
      }
      if (sum.is_claimed()) {
        return;
      }
      sum.wait();
    }
  });
  sum.settle();
  sum.release_rows();
  reduce.wait_for_readers();
}

}  // namespace weft
