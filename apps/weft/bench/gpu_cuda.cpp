// SPDX-License-Identifier: Apache-2.0
// `weft bench` and `weft tune` on GPUs. Every sample starts behind a barrier of the GPUs themselves
// and takes the next of several routings; its time is that of the slowest rank, between events on
// its stream.
#include <fmt/format.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "bench/run.hpp"
#include "call/executor.hpp"
#include "cli/progress.hpp"
#include "core/gpu/check.hpp"
#include "core/gpu/devices.hpp"
#include "core/gpu/stream.hpp"
#include "cuda/transport/peer_memory.hpp"
#include "measure/link_copies_cuda.hpp"
#include "measure/measure.hpp"

namespace weft::program {
namespace {

// Graphs of the calls: one for each routing, of `num_calls` calls that begin with it and take the
// others in turn.
class BenchGraphs {
 public:
  BenchGraphs(Bench& bench, BenchOp op, int num_calls, cudaStream_t stream)
      : bench_(bench), stream_(stream) {
    const size_t num_versions = bench_.num_versions();
    const size_t num_plans = num_versions * static_cast<size_t>(num_calls);
    for (size_t i = 0; i < num_plans; ++i) {
      alive_.push_back(bench_.plan_in_budget(i % num_versions));
    }
    alive_.clear();  // their memory is there for the captures
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
  BenchGraphs(const BenchGraphs&) = delete;
  BenchGraphs& operator=(const BenchGraphs&) = delete;
  ~BenchGraphs() {
    for (cudaGraphExec_t graph : graphs_) {
      static_cast<void>(cudaGraphExecDestroy(graph));
    }
  }

  // On the stream of the calls.
  void launch(size_t version) const {
    WEFT_CUDA(Context{}, cudaGraphLaunch(graphs_[version], stream_));
  }

 private:
  void capture(BenchOp op, size_t version) {
    if (op == BenchOp::kPlan) {
      alive_.push_back(bench_.plan_in_budget(version));
    } else if (op == BenchOp::kPlanDispatch) {
      alive_.push_back(bench_.plan_and_dispatch(version, true));
    } else {
      bench_.run_once(op, version);
    }
  }

  Bench& bench_;
  cudaStream_t stream_;
  std::vector<cudaGraphExec_t> graphs_;
  std::vector<Plan> alive_;  // a graph writes into its plans at every replay
};

class GpuBench final : public Bench {
 public:
  // Collective. The arguments must stay.
  GpuBench(
      const Group& group,
      const BenchOptions& options,
      const BenchRouting& routing,
      int gpu,
      cudaStream_t stream,
      double limit
  )
      : Bench(group, options, routing, {Device::Kind::kCuda, gpu}, stream),
        stream_(stream),
        limit_gbps_(limit),
        signals_(group, gpu, 4096) {
    WEFT_CUDA(Context{}, cudaSetDevice(gpu));
  }

  // Throws if copy engines did not carry the calls: these then went as usual, which is not what was
  // asked for.
  void check_copies() {
    if (!options_.is_copied) {
      return;
    }
    run_once(BenchOp::kDispatch, 0);
    run_once(BenchOp::kCombine, 0);
    const int64_t num_copied = exchange_.stats().num_copied;
    WEFT_CHECK(
        Context{},
        num_copied == 2,
        ErrorCode::kUnsupported,
        "bench: --copy-engines carried {} of 2 calls (dispatch and combine of 16-bit rows, between "
        "several ranks of one domain)",
        num_copied
    );
  }

  // A dispatch of rank_major rows has one role, and no split.
  std::vector<TunedSplit> tune() {
    const int all = gpu_sms();
    const bool one_row = options_.layout == Layout::kRankMajor;
    Progress progress("tune", group_.rank() == 0);
    std::vector<TunedSplit> splits;
    constexpr std::array<int, 10> kSms = {12, 16, 20, 24, 32, 40, 48, 64, 96, 0};
    constexpr int kFewest = 5;  // senders, in twentieths of a call's multiprocessors
    constexpr int kMost = 16;
    double done = 0;
    for (const int sms : kSms) {
      num_sms_ = sms > 0 ? sms : all;
      progress.update(
          done++ / static_cast<double>(kSms.size()), fmt::format("{} multiprocessors", num_sms_)
      );
      int before = 0;
      for (int share = kFewest; share <= kMost; ++share) {
        const int senders = (num_sms_ * share + 10) / 20;
        if (senders == before) {
          continue;
        }
        before = senders;
        Executor::of(exchange_).set_num_senders(senders);
        for (const BenchOp op : {BenchOp::kDispatch, BenchOp::kCombine}) {
          if (one_row && op == BenchOp::kDispatch) {
            continue;
          }
          const auto samples = slowest_of(group_, time(op, 0, options_.iterations));
          splits.push_back(
              {op == BenchOp::kDispatch ? Op::kDispatch : Op::kCombine,
               group_.num_ranks(),
               row_bytes(),
               {senders, num_sms_ - senders},
               percentile(samples, 50),
               one_row}
          );
        }
      }
    }
    return splits;
  }

 private:
  void finish() override {
    WEFT_CUDA(Context{}, cudaStreamSynchronize(stream_));
    exchange_.check();
  }

  CopyRates measure_rates(BenchOp /*op*/) override { return {.scatter = limit_gbps_}; }

  std::vector<double> time(BenchOp op, int graph_calls, int iterations) override {
    if (graph_calls == 0) {
      const bool is_planning = op == BenchOp::kPlan || op == BenchOp::kPlanDispatch;
      return time_work([&](size_t version) { run_once(op, version); }, is_planning, iterations);
    }
    const BenchGraphs graphs(*this, op, graph_calls, stream_);
    auto samples = time_work([&](size_t version) { graphs.launch(version); }, false, iterations);
    for (double& sample : samples) {
      sample /= graph_calls;
    }
    return samples;
  }

  std::vector<double> time_work(
      const std::function<void(size_t)>& work, bool waits_for_host, int iterations
  ) {
    const int total = options_.warmup + iterations;
    std::vector<cudaEvent_t> events(static_cast<size_t>(2 * total));
    for (cudaEvent_t& event : events) {
      WEFT_CUDA(Context{}, cudaEventCreate(&event));
    }
    WEFT_CUDA(Context{}, cudaStreamSynchronize(stream_));
    group_.barrier();
    for (int i = 0; i < total; ++i) {
      const auto at = static_cast<size_t>(2 * i);
      if (waits_for_host) {
        group_.barrier();
      }
      meet_peers(signals_.table(), group_.rank(), group_.num_ranks(), ++round_, stream_);
      WEFT_CUDA(Context{}, cudaGetLastError());
      WEFT_CUDA(Context{}, cudaEventRecord(events[at], stream_));
      work(static_cast<size_t>(i) % num_versions());
      WEFT_CUDA(Context{}, cudaEventRecord(events[at + 1], stream_));
    }
    finish();
    std::vector<double> samples;
    for (int i = options_.warmup; i < total; ++i) {
      const auto at = static_cast<size_t>(2 * i);
      float ms = 0;
      WEFT_CUDA(Context{}, cudaEventElapsedTime(&ms, events[at], events[at + 1]));
      samples.push_back(static_cast<double>(ms) * 1e3);
    }
    for (cudaEvent_t event : events) {
      WEFT_CUDA(Context{}, cudaEventDestroy(event));
    }
    return samples;
  }

  cudaStream_t stream_;
  double limit_gbps_;
  PeerMemory signals_;
  uint32_t round_ = 0;
};

// The bench of this rank, for run().
template <class Run>
auto with_bench(const Group& group, const BenchOptions& options, double limit, const Run& run) {
  const BenchRouting routing = bench_routing(options, group.num_ranks());
  const int gpu = options.device.device(group.rank()).index;
  const GpuStream stream(gpu);
  GpuBench bench(group, options, routing, gpu, stream.get(), limit);
  return run(bench);
}

}  // namespace

std::vector<TunedSplit> run_gpu_tune(const Group& group, const BenchOptions& options) {
  std::vector<TunedSplit> splits;
  BenchOptions of_layout = options;
  for (const Layout layout : {Layout::kExpertMajor, Layout::kRankMajor}) {
    of_layout.layout = layout;
    const auto found =
        with_bench(group, of_layout, 0, [](GpuBench& bench) { return bench.tune(); });
    splits.insert(splits.end(), found.begin(), found.end());
  }
  return splits;
}

BenchReport run_gpu_bench(const Group& group, const BenchOptions& options, double limit_gbps) {
  return with_bench(group, options, limit_gbps, [](GpuBench& bench) {
    bench.check_copies();
    return bench.run();
  });
}

}  // namespace weft::program
