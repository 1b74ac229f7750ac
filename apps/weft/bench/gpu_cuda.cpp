// SPDX-License-Identifier: Apache-2.0
// Every sample starts behind a barrier of the GPUs themselves and takes the next of several
// routings; its time is that of the slowest rank, between events on its stream.
#include <fmt/format.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <vector>

#include "bench/gpu.hpp"
#include "bench/gpu_calls_cuda.hpp"
#include "bench/gpu_kernels_cuda.hpp"
#include "bench/options.hpp"
#include "cli/progress.hpp"
#include "core/gpu/check.hpp"
#include "cuda/transport/peer_memory.hpp"
#include "measure/measure.hpp"

namespace weft::program {
namespace {

// Graphs of the calls: one for each routing, of `num_calls` calls that begin with it and take the
// others in turn.
class BenchGraphs {
 public:
  BenchGraphs(GpuCalls& calls, BenchOp op, int num_calls) : calls_(calls) {
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
  BenchGraphs(const BenchGraphs&) = delete;
  BenchGraphs& operator=(const BenchGraphs&) = delete;
  ~BenchGraphs() {
    for (cudaGraphExec_t graph : graphs_) {
      static_cast<void>(cudaGraphExecDestroy(graph));
    }
  }

  // On the stream of the calls.
  void launch(size_t version) const {
    WEFT_CUDA(Context{}, cudaGraphLaunch(graphs_[version], calls_.stream()));
  }

 private:
  void capture(BenchOp op, size_t version) {
    if (op == BenchOp::kPlan) {
      alive_.push_back(calls_.plan_in_budget(version));
    } else if (op == BenchOp::kPlanDispatch) {
      alive_.push_back(calls_.plan_and_dispatch(version));
    } else {
      calls_.run(op, version);
    }
  }

  GpuCalls& calls_;
  std::vector<cudaGraphExec_t> graphs_;
  std::vector<Plan> alive_;  // a graph writes into its plans at every replay
};

class GpuBench {
 public:
  GpuBench(
      const Group& group, const BenchOptions& options, const BenchRouting& routing, double limit
  )
      : group_(group),
        options_(options),
        routing_(routing),
        limit_gbps_(limit),
        calls_(group, options, routing),
        signals_(group, calls_.gpu(), 4096) {}

  GpuBench(const GpuBench&) = delete;
  GpuBench& operator=(const GpuBench&) = delete;

  std::vector<TunedSplit> tune() {
    int all = 0;
    WEFT_CUDA(
        Context{}, cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, calls_.gpu())
    );
    Progress progress("tune", group_.rank() == 0);
    std::vector<TunedSplit> splits;
    constexpr std::array<int, 9> kSms = {12, 16, 24, 32, 40, 48, 64, 96, 0};
    constexpr std::array<double, 6> kShares = {0.3, 0.4, 0.5, 0.6, 0.7, 0.8};
    double done = 0;
    for (const int sms : kSms) {
      for (const double share : kShares) {
        progress.update(
            done++ / static_cast<double>(kSms.size() * kShares.size()),
            fmt::format("{} multiprocessors", sms > 0 ? sms : all)
        );
        const int num_sms = sms > 0 ? sms : all;
        const int senders = std::max(1, static_cast<int>(num_sms * share + 0.5));
        calls_.take(num_sms, senders);
        for (const BenchOp op : {BenchOp::kDispatch, BenchOp::kCombine}) {
          const auto samples =
              slowest_of(group_, time([&](size_t version) { calls_.run(op, version); }, false));
          splits.push_back(
              {op == BenchOp::kDispatch ? TunedOp::kDispatch : TunedOp::kCombine,
               group_.num_ranks(),
               calls_.row_bytes(),
               {senders, num_sms - senders},
               percentile(samples, 50)}
          );
        }
      }
    }
    return splits;
  }

  BenchReport run() {
    BenchReport report;
    report.row_bytes = calls_.row_bytes();
    report.rates.scatter = limit_gbps_;
    check_copies();
    std::vector<int> sms = options_.sms;
    if (sms.empty()) {
      sms.push_back(0);
    }
    Progress progress("bench", group_.rank() == 0);
    double done = 0;
    for (const int num_sms : sms) {
      num_sms_ = num_sms;
      calls_.take(num_sms, 0);
      const auto verdict = options_.is_checked ? calls_.check() : Verdict{};
      for (const auto& [name, op] : kBenchOps) {
        if (!options_.wants(name)) {
          continue;
        }
        progress.update(
            done++ / static_cast<double>(kBenchOps.size() * sms.size()), std::string(name)
        );
        for (const int graph_calls : {0, 1, kLongGraph}) {
          if (graph_calls > 0 && !options_.is_graph) {
            continue;
          }
          report.results.push_back(measure(op, graph_calls));
          ResultRow& row = report.results.back().row;
          row.op = name;
          row.checked = is_good(verdict, op);
        }
      }
    }
    return report;
  }

 private:
  // What copy engines cannot carry goes as usual, which is not what was asked for.
  void check_copies() {
    if (!options_.is_copied) {
      return;
    }
    calls_.run(BenchOp::kDispatch, 0);
    calls_.run(BenchOp::kCombine, 0);
    const int64_t num_copied = calls_.exchange().stats().num_copied;
    WEFT_CHECK(
        Context{},
        num_copied == 2,
        ErrorCode::kUnsupported,
        "bench: --copy-engines carried {} of 2 calls (dispatch and combine of 16-bit rows, between "
        "several ranks of one domain)",
        num_copied
    );
  }

  // Microseconds of each sample on this rank.
  std::vector<double> time(const std::function<void(size_t)>& work, bool waits_for_host) {
    const cudaStream_t stream = calls_.stream();
    const int total = options_.warmup + options_.iterations;
    std::vector<cudaEvent_t> events(static_cast<size_t>(2 * total));
    for (cudaEvent_t& event : events) {
      WEFT_CUDA(Context{}, cudaEventCreate(&event));
    }
    WEFT_CUDA(Context{}, cudaStreamSynchronize(stream));
    group_.barrier();
    for (int i = 0; i < total; ++i) {
      const auto at = static_cast<size_t>(2 * i);
      if (waits_for_host) {
        group_.barrier();
      }
      launch_barrier(signals_.table(), group_.rank(), group_.num_ranks(), ++round_, stream);
      WEFT_CUDA(Context{}, cudaEventRecord(events[at], stream));
      work(static_cast<size_t>(i) % calls_.plans().size());
      WEFT_CUDA(Context{}, cudaEventRecord(events[at + 1], stream));
    }
    WEFT_CUDA(Context{}, cudaStreamSynchronize(stream));
    calls_.exchange().check();
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

  // Calls of a graph in which each finds the one before it just ended, as in a model's.
  static constexpr int kLongGraph = 8;

  static const char* mode_of(int graph_calls) {
    return graph_calls == 0 ? "exact" : graph_calls == 1 ? "budget graph" : "budget graph of 8";
  }

  // Of one call in graphs of so many.
  std::vector<double> time_graphs(BenchOp op, int num_calls) {
    const BenchGraphs graphs(calls_, op, num_calls);
    auto samples = time([&](size_t version) { graphs.launch(version); }, false);
    for (double& sample : samples) {
      sample /= num_calls;
    }
    return samples;
  }

  // Bytes: out of the rank that sends most and into the one that gets most, mean over the routings.
  struct Traffic {
    double wire = 0;
    double logical = 0;
    double most_out = 0;
    double most_in = 0;
  };
  Traffic traffic() {
    if (traffic_) {
      return *traffic_;
    }
    Traffic all;
    for (const Plan& plan : calls_.plans()) {
      const int64_t row_bytes = calls_.row_bytes();
      Traffic mine = {.logical = static_cast<double>(plan.logical_bytes(row_bytes))};
      mine.wire = mine.most_out = static_cast<double>(plan.wire_bytes(row_bytes));
      for (int peer = 0; peer < plan.num_ranks(); ++peer) {
        mine.most_in +=
            peer == plan.rank() ? 0 : static_cast<double>(plan.received_arrivals(peer) * row_bytes);
      }
      double most_out = 0;
      double most_in = 0;
      for (const Traffic& one : gather(group_, mine)) {
        all.wire += one.wire;
        all.logical += one.logical;
        most_out = std::max(most_out, one.most_out);
        most_in = std::max(most_in, one.most_in);
      }
      all.most_out += most_out;
      all.most_in += most_in;
    }
    const auto count = static_cast<double>(calls_.plans().size());
    all = {all.wire / count, all.logical / count, all.most_out / count, all.most_in / count};
    traffic_ = all;
    return all;
  }

  // `graph_calls`: of each graph, 0 for calls outside of graphs.
  BenchResult measure(BenchOp op, int graph_calls) {
    const Traffic bytes = traffic();
    const bool is_planning = op == BenchOp::kPlan || op == BenchOp::kPlanDispatch;
    BenchResult result = bench_result(
        group_,
        options_,
        routing_,
        slowest_of(
            group_,
            graph_calls > 0 ? time_graphs(op, graph_calls)
                            : time([&](size_t version) { calls_.run(op, version); }, is_planning)
        )
    );
    ResultRow& row = result.row;
    row.executor = "cuda";
    row.transport = calls_.exchange().config().transport;
    row.dtype = options_.is_fp8 ? "fp8" : row.dtype;
    row.tokens = calls_.max_tokens();
    row.sms = num_sms_;
    if (row.sms == 0) {
      WEFT_CUDA(
          Context{}, cudaDeviceGetAttribute(&row.sms, cudaDevAttrMultiProcessorCount, calls_.gpu())
      );
    }
    row.mode = mode_of(graph_calls);
    row.mode += options_.is_copied ? " copies" : options_.is_staged ? " staged" : " direct";
    if (op != BenchOp::kPlan) {
      row.wire_bytes = bytes.wire;
      row.logical_bytes = bytes.logical;
      if (limit_gbps_ > 0) {
        row.limit_us = std::max(bytes.most_out, bytes.most_in) / limit_gbps_ / 1e3;
      }
    }
    return result;
  }

  const Group& group_;
  const BenchOptions& options_;
  const BenchRouting& routing_;
  double limit_gbps_;
  GpuCalls calls_;
  PeerMemory signals_;
  uint32_t round_ = 0;
  int num_sms_ = 0;
  std::optional<Traffic> traffic_;
};

}  // namespace

std::vector<TunedSplit> run_gpu_tune(const Group& group, const BenchOptions& options) {
  const BenchRouting routing = bench_routing(options, group.num_ranks());
  return GpuBench(group, options, routing, 0).tune();
}

BenchReport run_gpu_bench(const Group& group, const BenchOptions& options, double limit_gbps) {
  const BenchRouting routing = bench_routing(options, group.num_ranks());
  return GpuBench(group, options, routing, limit_gbps).run();
}

}  // namespace weft::program
