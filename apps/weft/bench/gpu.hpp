// SPDX-License-Identifier: Apache-2.0
// `weft bench` on GPUs. gpu_cuda.cpp or gpu_none.cpp answers.
#pragma once

#include <vector>

#include "bench/options.hpp"
#include "bench/run.hpp"
#include "cuda/exchange/tuning.hpp"
#include "weft/group.hpp"

namespace weft::program {

// Collective; rank r uses GPU r % (number of GPUs). `limit_gbps` is what leaves a GPU at most; 0:
// not known, no percentages. The report is the same on every rank. Throws Error (kUnsupported) in a
// build without CUDA.
[[nodiscard]] BenchReport run_gpu_bench(
    const Group& group, const BenchOptions& options, double limit_gbps
);

// Collective. Every sensible split of multiprocessors, timed for dispatch and combine of the
// options' shape: medians of the slowest rank, the same on every rank.
[[nodiscard]] std::vector<TunedSplit> run_gpu_tune(const Group& group, const BenchOptions& options);

}  // namespace weft::program
