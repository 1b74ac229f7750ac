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
#include "core/device_memory.hpp"
#include "core/devices.hpp"
#include "core/stream_cuda.hpp"
#include "gpu_bench.hpp"
#include "gpu_bench_check_cuda.hpp"
#include "gpu_bench_kernels_cuda.hpp"
#include "gpu_bench_views.hpp"
#include "measure.hpp"
#include "plan/reference_plan.hpp"
#include "progress.hpp"
#include "transport/peer/peer_memory.hpp"
#include "weft/exchange.hpp"
#include "workload.hpp"

namespace weft::program {
namespace {

constexpr int64_t kScaleGroup = 128;

class GpuBench {
 public:
  GpuBench(
      const Group& group, const BenchOptions& options, const BenchRouting& routing, double limit
  )
      : group_(group),
        options_(options),
        routing_(routing),
        limit_gbps_(limit),
        rank_(static_cast<size_t>(group.rank())),
        device_{Device::Kind::kCuda, group.rank() % std::max<int>(1, num_gpus())},
        own_stream_(device_.index),
        stream_(own_stream_.get()),
        exchange_(group, config()),
        signals_(group, device_.index, 4096) {
    WEFT_CUDA(Context{}, cudaSetDevice(device_.index));
    for (const auto& routes : routing_.versions) {
      const RouteTable& mine = routes[rank_];
      std::vector<int64_t> wide(mine.expert.begin(), mine.expert.end());
      const uint64_t bytes = wide.size() * sizeof(int64_t);
      indices_.push_back(allocate_on(device_, bytes));
      copy_between(
          indices_.back().get(), device_, reinterpret_cast<const std::byte*>(wide.data()), {}, bytes
      );
    }
    for (size_t version = 0; version < indices_.size(); ++version) {
      plans_.push_back(exchange_.plan(routing_of(version), plan_options(), call()));
      max_rows_ = std::max(max_rows_, plans_.back().num_rows());
    }
    budget_ = max_rows_;
    rows_ = exchange_.allocate(max_rows_, options_.hidden, options_.dtype);
    staged_rows_ = options_.is_staged ? plain(max_rows_) : Tensor{};
    if (options_.is_fp8) {
      const int64_t groups = options_.hidden / kScaleGroup;
      scales_ = plain(num_tokens(), groups, DType::kFloat32);
      row_scales_ = plain(max_rows_, groups, DType::kFloat32);
    }
    experts_ = plain(max_rows_);
    x_ = plain(num_tokens());
    out_ = plain(num_tokens());
    const Tensor tokens = options_.is_fp8 ? as_bf16(as_bytes(x_)) : x_;
    launch_fill(tokens.data, tokens.rows, tokens.cols, token_seed(group.rank()), stream_);
    if (options_.is_fp8) {
      const Tensor scales = as_bf16(scales_);
      launch_fill(scales.data, scales.rows, scales.cols, scale_seed(group.rank()), stream_);
    }
    launch_fill(experts_.data, experts_.rows, experts_.cols, expert_seed(group.rank()), stream_);
    WEFT_CUDA(Context{}, cudaStreamSynchronize(stream_));
  }

  GpuBench(const GpuBench&) = delete;
  GpuBench& operator=(const GpuBench&) = delete;

  std::vector<GpuSplit> tune() {
    int all = 0;
    WEFT_CUDA(
        Context{}, cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, device_.index)
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
        num_sms_ = sms > 0 ? sms : all;
        num_senders_ = std::max(1, static_cast<int>(num_sms_ * share + 0.5));
        for (const BenchOp op : {BenchOp::kDispatch, BenchOp::kCombine}) {
          const auto samples = slowest_of(
              group_, time([&](size_t version) { run_once(op, version, false); }, false)
          );
          splits.push_back(
              {op, row_bytes(), num_senders_, num_sms_ - num_senders_, percentile(samples, 50)}
          );
        }
      }
    }
    return splits;
  }

  BenchReport run() {
    BenchReport report;
    report.row_bytes = row_bytes();
    report.rates.scatter = limit_gbps_;
    std::vector<int> sms = options_.sms;
    if (sms.empty()) {
      sms.push_back(0);
    }
    Progress progress("bench", group_.rank() == 0);
    double done = 0;
    for (const int num_sms : sms) {
      num_sms_ = num_sms;
      const Verdict verdict = options_.is_checked ? check() : Verdict{};
      for (const auto& [name, op] : kBenchOps) {
        const auto& asked = options_.ops;
        if (!asked.empty() && std::find(asked.begin(), asked.end(), name) == asked.end()) {
          continue;
        }
        progress.update(
            done++ / static_cast<double>(kBenchOps.size() * sms.size()), std::string(name)
        );
        for (const bool is_graph : {false, true}) {
          if (is_graph && !options_.is_graph) {
            continue;
          }
          report.results.push_back(measure(op, is_graph));
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
  struct Verdict {
    bool is_plan_good = false;
    bool is_dispatch_good = false;
    bool is_combine_good = false;
  };

  [[nodiscard]] int64_t row_bytes() const {
    const int64_t scales = options_.hidden / kScaleGroup * static_cast<int64_t>(sizeof(float));
    return options_.is_fp8 ? options_.hidden + scales
                           : options_.hidden * dtype_bytes(options_.dtype);
  }

  static int num_gpus() { return static_cast<int>(list_gpus().gpus.size()); }

  [[nodiscard]] int64_t max_tokens() const {
    int64_t most = 1;
    for (const auto& routes : routing_.versions) {
      for (const RouteTable& table : routes) {
        most = std::max(most, table.num_tokens);
      }
    }
    return most;
  }
  [[nodiscard]] int64_t num_tokens() const { return routing_.versions[0][rank_].num_tokens; }

  [[nodiscard]] ExchangeConfig config() const {
    ExchangeConfig config;
    config.hidden = options_.hidden;
    config.max_tokens = max_tokens();
    config.num_experts = routing_.num_experts;
    config.max_topk = routing_.topk;
    config.device = device_;
    config.mover = options_.mover;
    config.timeout = std::chrono::seconds(10);
    return config;
  }

  [[nodiscard]] PlanOptions plan_options() const {
    return {
        .layout = options_.layout,
        .pad_multiple = options_.layout == Layout::kRankMajor ? 1 : options_.pad_multiple,
    };
  }

  [[nodiscard]] CallOptions call() const {
    return {.stream = stream_, .num_sms = num_sms_, .num_senders = num_senders_};
  }

  [[nodiscard]] Routing routing_of(size_t version) const {
    const RouteTable& mine = routing_.versions[version][rank_];
    return {
        .topk_idx = {
            .data = indices_[version].get(),
            .dtype = DType::kInt64,
            .rows = mine.num_tokens,
            .cols = mine.topk,
            .device = device_}};
  }

  // In memory that peers do not know.
  Tensor plain(int64_t rows) { return plain(rows, options_.hidden, options_.dtype); }
  Tensor plain(int64_t rows, int64_t cols, DType dtype) {
    Tensor tensor = {.dtype = dtype, .rows = rows, .cols = cols};
    tensor.device = device_;
    memory_.push_back(allocate_on(device_, static_cast<uint64_t>(tensor.num_bytes())));
    tensor.data = memory_.back().get();
    return tensor;
  }

  [[nodiscard]] DispatchInput input(int64_t num_tokens) const {
    const Tensor x = head(x_, num_tokens);
    if (options_.is_fp8) {
      return {.x = as_bytes(x), .scales = head(scales_, num_tokens)};
    }
    return {.x = x};
  }
  [[nodiscard]] DispatchOutput output(int64_t num_rows) const {
    const Tensor rows = head(options_.is_staged ? staged_rows_ : rows_.tensor(), num_rows);
    if (options_.is_fp8) {
      return {.rows = as_bytes(rows), .scales = head(row_scales_, num_rows)};
    }
    return {.rows = rows};
  }

  void dispatch(const Plan& plan) {
    exchange_.dispatch(plan, input(plan.num_tokens()), output(plan.num_rows()), call());
  }

  // With a row budget, as a graph needs it.
  Plan plan_and_dispatch(size_t version) {
    PlanOptions options = plan_options();
    options.row_budget = budget_;
    const Routing routing = routing_of(version);
    return exchange_.dispatch(
        routing, options, input(routing.topk_idx.rows), output(budget_), call()
    );
  }

  void combine(const Plan& plan) {
    exchange_.combine(
        plan,
        {.rows = head(experts_, plan.num_rows())},
        {.x = head(out_, plan.num_tokens())},
        call()
    );
  }

  void run_once(BenchOp op, size_t version, bool is_budget) {
    PlanOptions options = plan_options();
    if (is_budget) {
      options.row_budget = budget_;
    }
    switch (op) {
      case BenchOp::kPlan:
        static_cast<void>(exchange_.plan(routing_of(version), options, call()));
        return;
      case BenchOp::kDispatch:
        dispatch(plans_[version]);
        return;
      case BenchOp::kCombine:
        combine(plans_[version]);
        return;
      case BenchOp::kPlanDispatch:
        dispatch(exchange_.plan(routing_of(version), options, call()));
        return;
    }
  }

  // Microseconds of each sample on this rank.
  std::vector<double> time(const std::function<void(size_t)>& work, bool waits_for_host) {
    const int total = options_.warmup + options_.iterations;
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
      launch_barrier(signals_.table(), group_.rank(), group_.num_ranks(), ++round_, stream_);
      WEFT_CUDA(Context{}, cudaEventRecord(events[at], stream_));
      work(static_cast<size_t>(i) % plans_.size());
      WEFT_CUDA(Context{}, cudaEventRecord(events[at + 1], stream_));
    }
    WEFT_CUDA(Context{}, cudaStreamSynchronize(stream_));
    exchange_.check();
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

  // One graph for each routing.
  std::vector<double> time_graphs(BenchOp op) {
    std::vector<cudaGraphExec_t> graphs;
    std::vector<Plan> alive;  // a graph writes into its plan at every replay
    for (size_t version = 0; version < plans_.size(); ++version) {
      alive.push_back(exchange_.plan(routing_of(version), plan_options(), call()));
    }
    alive.clear();  // their memory is there for the capture
    for (size_t version = 0; version < plans_.size(); ++version) {
      cudaGraph_t graph = nullptr;
      WEFT_CUDA(Context{}, cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
      if (op == BenchOp::kPlan) {
        PlanOptions options = plan_options();
        options.row_budget = budget_;
        alive.push_back(exchange_.plan(routing_of(version), options, call()));
      } else if (op == BenchOp::kPlanDispatch) {
        alive.push_back(plan_and_dispatch(version));
      } else {
        run_once(op, version, true);
      }
      WEFT_CUDA(Context{}, cudaStreamEndCapture(stream_, &graph));
      WEFT_CUDA(Context{}, cudaGraphInstantiate(&graphs.emplace_back(), graph, 0));
      WEFT_CUDA(Context{}, cudaGraphDestroy(graph));
    }
    auto samples = time(
        [&](size_t version) { WEFT_CUDA(Context{}, cudaGraphLaunch(graphs[version], stream_)); },
        false
    );
    for (cudaGraphExec_t graph : graphs) {
      WEFT_CUDA(Context{}, cudaGraphExecDestroy(graph));
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
    for (const Plan& plan : plans_) {
      double numbers[3] = {};
      numbers[0] = static_cast<double>(plan.wire_bytes(row_bytes()));
      numbers[1] = static_cast<double>(plan.logical_bytes(row_bytes()));
      for (int peer = 0; peer < plan.num_ranks(); ++peer) {
        numbers[2] += peer == plan.rank()
                          ? 0
                          : static_cast<double>(plan.received_arrivals(peer) * row_bytes());
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
    const auto count = static_cast<double>(plans_.size());
    all = {all.wire / count, all.logical / count, all.most_out / count, all.most_in / count};
    traffic_ = all;
    return all;
  }

  BenchResult measure(BenchOp op, bool is_graph) {
    const Traffic bytes = traffic();
    const bool is_planning = op == BenchOp::kPlan || op == BenchOp::kPlanDispatch;
    BenchResult result;
    result.samples_us = slowest_of(
        group_,
        is_graph ? time_graphs(op)
                 : time([&](size_t version) { run_once(op, version, false); }, is_planning)
    );
    ResultRow& row = result.row;
    row.executor = "cuda";
    row.transport = exchange_.config().transport;
    row.layout = layout_name(options_.layout);
    row.dtype = options_.is_fp8 ? "fp8" : dtype_name(options_.dtype);
    row.ranks = group_.num_ranks();
    row.tokens = max_tokens();
    row.hidden = options_.hidden;
    row.experts = routing_.num_experts;
    row.topk = routing_.topk;
    row.pad = plan_options().pad_multiple;
    row.sms = num_sms_;
    if (row.sms == 0) {
      WEFT_CUDA(
          Context{}, cudaDeviceGetAttribute(&row.sms, cudaDevAttrMultiProcessorCount, device_.index)
      );
    }
    row.mode = is_graph ? "budget graph" : "exact";
    row.mode += options_.is_staged ? " staged" : " direct";
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

  bool is_dispatch_right(const std::vector<Plan>& expected) {
    const Tensor& rows = options_.is_staged ? staged_rows_ : rows_.tensor();
    if (!options_.is_fp8) {
      return rows_are_right(rows, expected, rank_, token_seed);
    }
    return rows_are_right(as_bf16(as_bytes(rows)), expected, rank_, token_seed) &&
           rows_are_right(as_bf16(row_scales_), expected, rank_, scale_seed);
  }

  // Plans in full; of the rows a sample, every element of them.
  Verdict check() {
    std::vector<Plan> expected;
    for (PlanData& data :
         reference_plans(routing_.versions[0], routing_.num_experts, plan_options())) {
      expected.emplace_back(std::make_shared<const PlanData>(std::move(data)));
    }
    launch_fill(rows_.tensor().data, max_rows_, options_.hidden, 77, stream_);
    run_once(BenchOp::kDispatch, 0, false);
    run_once(BenchOp::kCombine, 0, false);
    WEFT_CUDA(Context{}, cudaStreamSynchronize(stream_));
    exchange_.check();
    Verdict mine = {
        plans_[0] == expected[rank_],
        is_dispatch_right(expected),
        sums_are_right(out_, expected[rank_])};
    if (options_.is_graph) {
      launch_fill(rows_.tensor().data, max_rows_, options_.hidden, 77, stream_);
      static_cast<void>(plan_and_dispatch(0));
      WEFT_CUDA(Context{}, cudaStreamSynchronize(stream_));
      exchange_.check();
      mine.is_dispatch_good &= is_dispatch_right(expected);
    }
    Bytes block(sizeof mine);
    std::memcpy(block.data(), &mine, sizeof mine);
    Verdict all = {true, true, true};
    for (const Bytes& bytes : group_.all_gather(block)) {
      std::memcpy(&mine, bytes.data(), sizeof mine);
      all.is_plan_good &= mine.is_plan_good;
      all.is_dispatch_good &= mine.is_dispatch_good;
      all.is_combine_good &= mine.is_combine_good;
    }
    return all;
  }

  const Group& group_;
  const BenchOptions& options_;
  const BenchRouting& routing_;
  double limit_gbps_;
  size_t rank_;
  Device device_;
  GpuStream own_stream_;
  cudaStream_t stream_;
  Exchange exchange_;
  PeerMemory signals_;
  uint32_t round_ = 0;
  int num_sms_ = 0;
  int num_senders_ = 0;
  std::vector<std::shared_ptr<std::byte>> indices_;  // by version
  std::vector<Plan> plans_;                          // by version
  int64_t max_rows_ = 1;
  int64_t budget_ = 0;
  std::vector<std::shared_ptr<std::byte>> memory_;
  Buffer rows_;
  Tensor staged_rows_;
  Tensor experts_;
  Tensor x_;
  Tensor scales_;
  Tensor row_scales_;
  Tensor out_;
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
