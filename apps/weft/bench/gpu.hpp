// SPDX-License-Identifier: Apache-2.0
// `weft bench` on GPUs. gpu_bench_cuda.cpp or gpu_bench_none.cpp answers.
#pragma once

#include <vector>

#include "bench_options.hpp"
#include "bench_run.hpp"
#include "weft/group.hpp"

namespace weft::program {

// Collective; rank r uses GPU r % (number of GPUs). `limit_gbps` is what leaves a GPU at most; 0:
// not known, no percentages. The report is the same on every rank. Throws Error (kUnsupported) in a
// build without CUDA.
[[nodiscard]] BenchReport run_gpu_bench(
    const Group& group, const BenchOptions& options, double limit_gbps
);

// Collective. Every sensible split of multiprocessors, timed for dispatch and combine of the
// options' shape; the same on every rank.
struct GpuSplit {
  BenchOp op = BenchOp::kDispatch;
  int64_t row_bytes = 0;
  int senders = 0;
  int others = 0;
  double us = 0;  // median of the slowest rank
};
[[nodiscard]] std::vector<GpuSplit> run_gpu_tune(const Group& group, const BenchOptions& options);

}  // namespace weft::program
