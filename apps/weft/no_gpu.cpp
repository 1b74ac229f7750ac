// SPDX-License-Identifier: Apache-2.0
// Stand-in for bench/gpu_cuda.cpp and measure/limits_cuda.cpp in builds without CUDA. It is never
// reached: choose_device() finds no GPU there.
#include "bench/run.hpp"
#include "core/check.hpp"
#include "measure/limits_cuda.hpp"

namespace weft::program {
namespace {

[[noreturn]] void refuse() {
  raise_error(ErrorCode::kUnsupported, {}, "this build leaves CUDA out");
}

}  // namespace

BenchReport run_gpu_bench(const Group&, const BenchOptions&, double) {
  refuse();
}

std::vector<TunedSplit> run_gpu_tune(const Group&, const BenchOptions&) {
  refuse();
}

GpuLinkLimits measure_gpu_limits(int, bool) {
  refuse();
}

double all_to_all_limit_gbps() {
  refuse();
}

}  // namespace weft::program
