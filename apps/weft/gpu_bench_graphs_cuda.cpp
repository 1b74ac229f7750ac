// SPDX-License-Identifier: Apache-2.0
#include "gpu_bench_graphs_cuda.hpp"

#include "core/check_cuda.hpp"

namespace weft::program {

BenchGraphs::BenchGraphs(GpuCalls& calls, BenchOp op, int num_calls) : calls_(calls) {
  const size_t num_versions = calls_.plans().size();
  const size_t num_plans = num_versions * static_cast<size_t>(num_calls);
  for (size_t i = 0; i < num_plans; ++i) {
    alive_.push_back(calls_.plan_in_budget(i % num_versions));
  }
  alive_.clear();  // their memory is there for the captures
  const cudaStream_t stream = calls_.stream();
  for (size_t version = 0; version < num_versions; ++version) {
    cudaGraph_t graph = nullptr;
    WEFT_CUDA(Context{}, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (size_t i = 0; i < static_cast<size_t>(num_calls); ++i) {
      capture(op, (version + i) % num_versions);
    }
    WEFT_CUDA(Context{}, cudaStreamEndCapture(stream, &graph));
    WEFT_CUDA(Context{}, cudaGraphInstantiate(&graphs_.emplace_back(), graph, 0));
    WEFT_CUDA(Context{}, cudaGraphDestroy(graph));
  }
}

BenchGraphs::~BenchGraphs() {
  for (cudaGraphExec_t graph : graphs_) {
    static_cast<void>(cudaGraphExecDestroy(graph));
  }
}

void BenchGraphs::launch(size_t version) const {
  WEFT_CUDA(Context{}, cudaGraphLaunch(graphs_[version], calls_.stream()));
}

void BenchGraphs::capture(BenchOp op, size_t version) {
  if (op == BenchOp::kPlan) {
    alive_.push_back(calls_.plan_in_budget(version));
  } else if (op == BenchOp::kPlanDispatch) {
    alive_.push_back(calls_.plan_and_dispatch(version));
  } else {
    calls_.run(op, version);
  }
}

}  // namespace weft::program
