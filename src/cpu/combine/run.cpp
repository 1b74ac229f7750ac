// SPDX-License-Identifier: Apache-2.0
// Combine on CPU threads, the adjoint of dispatch/run.cpp. Previous in the data flow:
// combine/call.cpp.
//
// Each worker takes turns: pre-reduce a chunk for every token rank, add up what this domain's ranks
// have for tokens of others, sum the tokens that are complete.
#include "cpu/combine/forward.hpp"
#include "cpu/combine/reduce.hpp"
#include "cpu/combine/sum.hpp"

namespace weft {

void combine_cpu(
    const CpuRank& rank, const CpuCall& call, const CombineInput& in, const CombineOutput& out
) {
  CombineReduce reduce(rank, call, in);
  if (in.scale == CombineScale::kSourceWeights) {
    reduce.swap_source_weights();
  }
  CombineForward forward(rank, call, in);
  CombineSum sum(rank, call, in, out);
  const WaitReason reason = {.op = "combine", .call = call.number, .what = "partial sums"};
  const auto run_unit = [&](int64_t unit, int worker) { reduce.run(unit, worker); };
  take_turns(rank, reason, reduce.num_units(), run_unit, forward, sum);
  forward.settle();
  sum.settle();
  sum.release_rows();
  reduce.wait_for_readers();
}

}  // namespace weft
