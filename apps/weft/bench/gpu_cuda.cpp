// SPDX-License-Identifier: Apache-2.0
// Every sample starts behind a barrier of the GPUs themselves and takes the next of several
// routings; its time is that of the slowest rank, between events on its stream.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <optional>

#include "bench_routing.hpp"
#include "core/check_cuda.hpp"
#include "gpu_bench.hpp"
#include "gpu_bench_calls_cuda.hpp"
#include "gpu_bench_graphs_cuda.hpp"
#include "gpu_bench_kernels_cuda.hpp"
#include "measure.hpp"
#include "progress.hpp"
#include "transport/peer/peer_memory.hpp"

namespace weft::program {
namespace {

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

  std::vector<GpuSplit> tune() {
    int all = 0;
    WEFT_CUDA(
        Context{}, cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, calls_.gpu())
    );
    Progress progress("tune", group_.rank() == 0);
    std::vector<GpuSplit> splits;
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
              {op, calls_.row_bytes(), senders, num_sms - senders, percentile(samples, 50)}
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
      const auto verdict = options_.is_checked ? calls_.check() : GpuCalls::Verdict{};
      for (const auto& [name, op] : kBenchOps) {
        const auto& asked = options_.ops;
        if (!asked.empty() && std::find(asked.begin(), asked.end(), name) == asked.end()) {
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
          row.checked = op == BenchOp::kCombine ? verdict.is_combine_good
                        : op == BenchOp::kPlan  ? verdict.is_plan_good
                        : op == BenchOp::kDispatch
                            ? verdict.is_dispatch_good
                            : verdict.is_plan_good && verdict.is_dispatch_good;
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
      double numbers[3] = {};
      numbers[0] = static_cast<double>(plan.wire_bytes(calls_.row_bytes()));
      numbers[1] = static_cast<double>(plan.logical_bytes(calls_.row_bytes()));
      for (int peer = 0; peer < plan.num_ranks(); ++peer) {
        numbers[2] += peer == plan.rank()
                          ? 0
                          : static_cast<double>(plan.received_arrivals(peer) * calls_.row_bytes());
      }
      Bytes block(sizeof numbers);
      std::memcpy(block.data(), numbers, sizeof numbers);
      double most_out = 0;
      double most_in = 0;
      for (const Bytes& bytes : group_.all_gather(block)) {
        std::memcpy(numbers, bytes.data(), sizeof numbers);
        all.wire += numbers[0];
        all.logical += numbers[1];
        most_out = std::max(most_out, numbers[0]);
        most_in = std::max(most_in, numbers[2]);
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
    BenchResult result;
    result.samples_us = slowest_of(
        group_,
        graph_calls > 0 ? time_graphs(op, graph_calls)
                        : time([&](size_t version) { calls_.run(op, version); }, is_planning)
    );
    ResultRow& row = result.row;
    row.executor = "cuda";
    row.transport = calls_.exchange().config().transport;
    row.layout = layout_name(options_.layout);
    row.dtype = options_.is_fp8 ? "fp8" : dtype_name(options_.dtype);
    row.ranks = group_.num_ranks();
    row.tokens = calls_.max_tokens();
    row.hidden = options_.hidden;
    row.experts = routing_.num_experts;
    row.topk = routing_.topk;
    row.pad = calls_.plan_options().pad_multiple;
    row.sms = num_sms_;
    if (row.sms == 0) {
      WEFT_CUDA(
          Context{}, cudaDeviceGetAttribute(&row.sms, cudaDevAttrMultiProcessorCount, calls_.gpu())
      );
    }
    row.mode = mode_of(graph_calls);
    row.mode += options_.is_copied ? " copies" : options_.is_staged ? " staged" : " direct";
    row.us_p50 = percentile(result.samples_us, 50);
    row.us_p99 = percentile(result.samples_us, 99);
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

std::vector<GpuSplit> run_gpu_tune(const Group& group, const BenchOptions& options) {
  const BenchRouting routing = bench_routing(options, group.num_ranks());
  return GpuBench(group, options, routing, 0).tune();
}

BenchReport run_gpu_bench(const Group& group, const BenchOptions& options, double limit_gbps) {
  const BenchRouting routing = bench_routing(options, group.num_ranks());
  return GpuBench(group, options, routing, limit_gbps).run();
}

}  // namespace weft::program
