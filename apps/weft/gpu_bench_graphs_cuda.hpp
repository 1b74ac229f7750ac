// SPDX-License-Identifier: Apache-2.0
// Graphs of the calls of `weft bench` on GPUs.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "gpu_bench_calls_cuda.hpp"

namespace weft::program {

// One for each routing, of `num_calls` calls that begin with it and take the others in turn.
class BenchGraphs {
 public:
  BenchGraphs(GpuCalls& calls, BenchOp op, int num_calls);
  ~BenchGraphs();
  BenchGraphs(const BenchGraphs&) = delete;
  BenchGraphs& operator=(const BenchGraphs&) = delete;

  // On the stream of the calls.
  void launch(size_t version) const;

 private:
  void capture(BenchOp op, size_t version);

  GpuCalls& calls_;
  std::vector<cudaGraphExec_t> graphs_;
  std::vector<Plan> alive_;  // a graph writes into its plans at every replay
};

}  // namespace weft::program
