// SPDX-License-Identifier: Apache-2.0
#include "bench/run.hpp"
#include "core/check.hpp"

namespace weft::program {

BenchReport run_gpu_bench(const Group&, const BenchOptions&, double /*limit_gbps*/) {
  raise_error(ErrorCode::kUnsupported, Context{}, "bench: this build has no CUDA");
}

std::vector<TunedSplit> run_gpu_tune(const Group&, const BenchOptions&) {
  raise_error(ErrorCode::kUnsupported, Context{}, "tune: this build has no CUDA");
}

}  // namespace weft::program
