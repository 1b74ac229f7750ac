// SPDX-License-Identifier: Apache-2.0
#include "bench/run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cli/progress.hpp"
#include "core/check.hpp"
#include "core/gpu/device_memory.hpp"
#include "core/gpu/devices.hpp"
#include "measure/bench_check.hpp"
#include "measure/limits.hpp"
#include "measure/measure.hpp"
#include "measure/workload.hpp"
#include "plan/file/routing_file.hpp"
#include "plan/random_routing.hpp"
#include "routing/source.hpp"

namespace weft::program {
namespace {

constexpr uint64_t kMadeUpVersions = 4;
constexpr int64_t kFileVersions = 16;

BenchRouting made_up_routing(const BenchOptions& options, int num_ranks) {
  MadeUpRouting spec = options.made_up;
  spec.num_ranks = num_ranks;
  BenchRouting routing = {spec.num_experts, spec.topk, {}};
  for (uint64_t version = 0; version < kMadeUpVersions; ++version) {
    spec.seed = mix_seed(options.made_up.seed, version);
    routing.versions.push_back(make_up_routing(spec).routes);
  }
  return routing;
}

// Records spread evenly over the file.
BenchRouting file_routing(const std::string& path, int num_ranks) {
  RoutingFileReader file(path);
  WEFT_CHECK(
      Context{},
      file.shape().num_ranks == num_ranks,
      ErrorCode::kFile,
      "bench: {} holds routing of {} ranks (this run has {})",
      path,
      file.shape().num_ranks,
      num_ranks
  );
  WEFT_CHECK(
      Context{}, file.num_records() > 0, ErrorCode::kFile, "bench: {} holds no records", path
  );
  BenchRouting routing = {file.shape().num_experts, file.shape().topk, {}};
  const int64_t num_versions = std::min(kFileVersions, file.num_records());
  for (int64_t version = 0; version < num_versions; ++version) {
    routing.versions.push_back(file.read(version * file.num_records() / num_versions).routes);
  }
  return routing;
}

bool is_good(const Verdict& verdict, BenchOp op) {
  const bool has_plan = op == BenchOp::kPlan || op == BenchOp::kPlanDispatch;
  const bool has_dispatch = op == BenchOp::kDispatch || op == BenchOp::kPlanDispatch;
  return (!has_plan || verdict.is_plan_good) && (!has_dispatch || verdict.is_dispatch_good) &&
         (op != BenchOp::kCombine || verdict.is_combine_good);
}

constexpr int64_t kScaleGroup = 128;  // elements of an FP8 row for which there is one scale
// Rows of each source that are checked on a GPU, from where each is fetched; on a CPU it is all.
constexpr int64_t kCheckedOnGpu = 256;
// Calls of a graph in which each finds the one before it just ended, as in a model's.
constexpr int kLongGraph = 8;
constexpr int64_t kLimitMemoryBytes = 512 << 20;
constexpr double kLimitSeconds = 0.02;  // of each turn, and way of copying
constexpr int kTurns = 5;               // of copies and an operation on CPUs

class CpuBench final : public Bench {
 public:
  CpuBench(const Group& group, const BenchOptions& options, const BenchRouting& routing)
      : Bench(group, options, routing, {}, nullptr) {}

 private:
  void finish() override {}

  // Rank 0 measures while the others wait, so that nothing else runs.
  CopyRates measure_rates(BenchOp op) override {
    CopyRates mine;
    if (group_.rank() == 0) {
      if (!rig_) {
        rig_.emplace(copy_shape());
      }
      const auto gbps = [&](CopyMethod method) {
        return rig_->measure({.method = method, .seconds = kLimitSeconds});
      };
      if (op == BenchOp::kCombine) {
        mine.gather = gbps(CopyMethod::kGather);
      } else {
        mine.scatter = std::max(gbps(CopyMethod::kMemcpy), gbps(CopyMethod::kStream));
      }
    }
    return gather(group_, mine)[0];
  }

  [[nodiscard]] CopyShape copy_shape() const {
    const double copies = bytes_.logical / std::max(bytes_.tokens, 1.0);
    CopyShape shape;
    shape.num_ranks = group_.num_ranks();
    shape.threads_per_rank = exchange_.config().num_threads;
    shape.row_bytes = row_bytes();
    shape.copies = std::max(1, static_cast<int>(std::lround(copies)));
    shape.source_bytes = std::min(
        std::max<int64_t>(routing_.max_tokens(), 1) * row_bytes(),
        kLimitMemoryBytes / shape.num_ranks / shape.copies
    );
    return shape;
  }

  std::vector<double> time(BenchOp op, int /*graph_calls*/, int iterations) override {
    std::vector<double> mine;
    for (int i = -options_.warmup; i < iterations; ++i) {
      const auto version = static_cast<size_t>(i + options_.warmup) % num_versions();
      group_.barrier();
      const Stopwatch watch;
      run_once(op, version);
      const double us = watch.microseconds();
      if (i >= 0) {
        mine.push_back(us);
      }
    }
    return mine;
  }

  std::optional<CopyRig> rig_;  // of rank 0
};

// Views the same bytes as rows of bf16, which can be made up and compared.
Tensor as_bf16(Tensor tensor, int64_t row_bytes) {
  tensor.cols = row_bytes / dtype_bytes(DType::kBFloat16);
  tensor.dtype = DType::kBFloat16;
  return tensor;
}

}  // namespace

BenchRouting bench_routing(const BenchOptions& options, int num_ranks) {
  return options.routing_file.empty() ? made_up_routing(options, num_ranks)
                                      : file_routing(options.routing_file, num_ranks);
}

Bench::Bench(
    const Group& group,
    const BenchOptions& options,
    const BenchRouting& routing,
    const Device& device,
    void* stream
)
    : group_(group),
      options_(options),
      routing_(routing),
      rank_(static_cast<size_t>(group.rank())),
      device_(device),
      exchange_(group, config()),
      stream_(stream),
      tokens_{mix_seed(options.made_up.seed, 1)},
      expert_rows_{mix_seed(options.made_up.seed, 2)},
      scale_rows_{mix_seed(options.made_up.seed, 3)} {
  for (const auto& routes : routing_.versions) {
    const RouteTable& mine = routes[rank_];
    const std::vector<int64_t> wide(mine.expert.begin(), mine.expert.end());
    const ConstTensor host = is_on_gpu() ? matrix(wide.data(), mine.num_tokens, mine.topk)
                                         : matrix(mine.expert.data(), mine.num_tokens, mine.topk);
    const Tensor here = plain(host.rows, host.cols, host.dtype);
    copy_between(here.data, device_, host.data, {}, static_cast<uint64_t>(host.num_bytes()));
    topk_idx_.emplace_back(here);
  }
  for (size_t version = 0; version < topk_idx_.size(); ++version) {
    plans_.push_back(exchange_.plan(routing_of(version), plan_options(), call()));
    max_rows_ = std::max(max_rows_, plans_.back().num_rows());
  }
  const auto [hidden, dtype] = std::pair(options_.hidden, options_.dtype);
  const int64_t max_tokens = routing_.max_tokens();
  x_ = plain(max_tokens, hidden, dtype);
  tokens_.fill(is_fp8() ? as_bf16(x_, hidden) : x_, group.rank());
  out_ = plain(max_tokens, hidden, dtype);
  experts_ = plain(max_rows_, hidden, dtype);
  expert_rows_.fill(experts_, group.rank());
  if (options_.is_staged) {
    rows_ = plain(max_rows_, hidden, dtype);
  } else {
    buffer_ = exchange_.allocate(max_rows_, hidden, dtype);
    rows_ = buffer_.tensor();
  }
  if (is_fp8()) {
    scales_ = plain(max_tokens, hidden / kScaleGroup, DType::kFloat32);
    scale_rows_.fill(scales_, group.rank());
    row_scales_ = plain(max_rows_, hidden / kScaleGroup, DType::kFloat32);
  }
}

ExchangeConfig Bench::config() const {
  ExchangeConfig config = {
      .hidden = options_.hidden,
      .max_tokens = std::max<int64_t>(1, routing_.max_tokens()),
      .num_experts = routing_.num_experts,
      .max_topk = routing_.topk,
      .device = device_};
  if (is_on_gpu()) {
    config.mover = options_.mover;
    config.copy_engines = options_.is_copied;
    config.timeout = std::chrono::seconds(10);
  } else {
    config.transport = options_.transport;
    config.num_threads = options_.threads_per_rank;
  }
  return config;
}

CallOptions Bench::call() const {
  return {.stream = stream_, .num_sms = num_sms_, .copy_engines = options_.is_copied};
}

int64_t Bench::row_bytes() const {
  const int64_t scales = options_.hidden / kScaleGroup * static_cast<int64_t>(sizeof(float));
  return is_fp8() ? options_.hidden + scales : options_.hidden * dtype_bytes(options_.dtype);
}

PlanOptions Bench::plan_options(std::optional<int64_t> row_budget) const {
  PlanOptions options = options_.plan_options();
  options.row_budget = row_budget;
  return options;
}

Tensor Bench::plain(int64_t rows, int64_t cols, DType dtype) {
  Tensor tensor = {.dtype = dtype, .rows = rows, .cols = cols};
  tensor.device = device_;
  memory_.push_back(allocate_on(device_, static_cast<uint64_t>(tensor.num_bytes())));
  tensor.data = memory_.back().get();
  return tensor;
}

DispatchInput Bench::input(int64_t num_tokens) const {
  DispatchInput in = {.x = head(x_, num_tokens)};
  if (is_fp8()) {  // as many bytes as there were elements: any do
    in.x.dtype = DType::kByte;
    in.scales = head(scales_, num_tokens);
  }
  return in;
}

DispatchOutput Bench::output(int64_t num_rows) const {
  DispatchOutput out = {.rows = head(rows_, num_rows)};
  if (is_fp8()) {
    out.rows.dtype = DType::kByte;
    out.scales = head(row_scales_, num_rows);
  }
  return out;
}

void Bench::dispatch(const Plan& plan) {
  exchange_.dispatch(plan, input(plan.num_tokens()), output(plan.num_rows()), call());
}

Plan Bench::plan_in_budget(size_t version) {
  return exchange_.plan(routing_of(version), plan_options(max_rows_), call());
}

Plan Bench::plan_and_dispatch(size_t version, bool has_budget) {
  const Routing routing = routing_of(version);
  const DispatchInput in = input(routing.topk_idx.rows);
  const PlanOptions options = has_budget ? plan_options(max_rows_) : plan_options();
  if (has_budget || exchange_.writes_alone(routing, options, in, call())) {
    return exchange_.dispatch(routing, options, in, output(max_rows_), call());
  }
  Plan plan = exchange_.plan(routing, options, call());
  dispatch(plan);
  return plan;
}

void Bench::run_once(BenchOp op, size_t version) {
  const Plan& plan = plans_[version];
  switch (op) {
    case BenchOp::kPlan:
      static_cast<void>(exchange_.plan(routing_of(version), plan_options(), call()));
      return;
    case BenchOp::kDispatch:
      dispatch(plan);
      return;
    case BenchOp::kCombine:
      exchange_.combine(
          plan,
          {.rows = head(experts_, plan.num_rows())},
          {.x = head(out_, plan.num_tokens())},
          call()
      );
      return;
    case BenchOp::kPlanDispatch:
      static_cast<void>(plan_and_dispatch(version, false));
      return;
  }
}

int64_t Bench::num_checked() const {
  return is_on_gpu() ? kCheckedOnGpu : std::numeric_limits<int32_t>::max();
}

// Returns whether dispatch() gives what it should in an output that held other rows.
bool Bench::is_right_after(
    const std::vector<Plan>& expected, const std::function<void()>& dispatch
) {
  expert_rows_.fill(rows_, group_.rank());
  dispatch();
  finish();
  const auto is_right = [&](const Tensor& rows, const MadeUpRows& made_up) {
    return rows_are_right(rows, expected, rank_, made_up, num_checked());
  };
  return is_fp8()
             ? is_right(as_bf16(rows_, rows_.cols), tokens_) && is_right(row_scales_, scale_rows_)
             : is_right(rows_, tokens_);
}

Verdict Bench::check() {
  const auto expected = expected_plans(routing_.versions[0], routing_.num_experts, plan_options());
  Verdict mine;
  mine.is_dispatch_good = is_right_after(expected, [&] {
    run_once(BenchOp::kDispatch, 0);
    run_once(BenchOp::kCombine, 0);
  });
  mine.is_plan_good = plans_[0] == expected[rank_];
  const auto& domain_of = group_.topology().domain_of;
  mine.is_combine_good =
      sums_are_right(out_, expected[rank_], domain_of, expert_rows_, num_checked());
  for (const bool has_budget : {false, true}) {
    if (is_on_gpu() && (!has_budget || options_.is_graph)) {
      mine.is_dispatch_good &=
          is_right_after(expected, [&] { static_cast<void>(plan_and_dispatch(0, has_budget)); });
    }
  }
  return verdict_of_all(group_, mine);
}

BenchBytes Bench::bytes_of_all_ranks() const {
  const auto mean = [&](int64_t rows) {
    return static_cast<double>(rows * row_bytes()) / static_cast<double>(plans_.size());
  };
  BenchBytes all;
  for (const Plan& plan : plans_) {
    const double wire = mean(plan.wire_bytes(1));
    BenchBytes mine = {{mean(plan.logical_bytes(1)), wire, mean(plan.num_tokens())}, wire};
    mine.returned = mean(plan.returned_bytes(1));
    for (int peer = 0; peer < plan.num_ranks(); ++peer) {
      mine.most_in += peer == plan.rank() ? 0 : mean(plan.received_arrivals(peer));
    }
    BenchBytes most;
    for (const BenchBytes& one : gather(group_, mine)) {
      all.logical += one.logical;
      all.wire += one.wire;
      all.tokens += one.tokens;
      all.returned += one.returned;
      most.most_out = std::max(most.most_out, one.most_out);
      most.most_in = std::max(most.most_in, one.most_in);
    }
    all.most_out += most.most_out;
    all.most_in += most.most_in;
  }
  return all;
}

std::string Bench::mode_of(int graph_calls) const {
  const char* calls = graph_calls == 0   ? "exact"
                      : graph_calls == 1 ? "budget graph"
                                         : "budget graph of 8";
  const char* rows = options_.is_copied ? "copies" : options_.is_staged ? "staged" : "direct";
  return fmt::format("{} {}{}", calls, rows, options_.order == SumOrder::kTopk ? " topk" : "");
}

double Bench::limit_us(const ResultRow& row) const {
  if (is_on_gpu()) {
    const double most = std::max(bytes_.most_out, bytes_.most_in);
    return rates_.scatter > 0 ? most / rates_.scatter / 1e3 : 0;
  }
  return rates_.limit_us(row.op == "combine" ? Op::kCombine : Op::kDispatch, bytes_.logical);
}

int Bench::gpu_sms() const {
  return list_gpus().gpus[static_cast<size_t>(device_.index)].num_sms;
}

BenchReport Bench::run() {
  BenchReport report;
  report.row_bytes = row_bytes();
  const std::vector<int> sms =
      is_on_gpu() && !options_.sms.empty() ? options_.sms : std::vector<int>{0};
  const std::vector<int> graphs =
      is_on_gpu() && options_.is_graph ? std::vector<int>{0, 1, kLongGraph} : std::vector<int>{0};
  Progress progress("bench", group_.rank() == 0);
  double done = 0;
  for (const int num_sms : sms) {
    num_sms_ = num_sms;
    const Verdict verdict = options_.is_checked ? check() : Verdict{};
    bytes_ = bytes_of_all_ranks();
    for (const auto& [name, op] : kBenchOps) {
      const double total = static_cast<double>(kBenchOps.size() * sms.size());
      progress.update(done++ / total, std::string(name));
      if (!options_.wants(name)) {
        continue;
      }
      for (const int graph_calls : graphs) {
        ResultRow& row = report.results.emplace_back(measure(op, graph_calls)).row;
        row.op = name;
        row.checked = is_good(verdict, op);
      }
    }
  }
  report.rates = rates_;
  for (BenchResult& result : report.results) {
    result.row.limit_us = result.row.logical_bytes > 0 ? limit_us(result.row) : 0;
  }
  return report;
}

// Measures in turns with plain copies: what a machine can do changes from one moment to the next.
BenchResult Bench::measure(BenchOp op, int graph_calls) {
  const bool has_rows = op != BenchOp::kPlan;
  const int turns = is_on_gpu() ? 1 : std::min(kTurns, options_.iterations);
  std::vector<double> samples;
  for (int turn = 0; turn < turns; ++turn) {
    if (has_rows) {
      const CopyRates rates = measure_rates(op);
      rates_.scatter = std::max(rates_.scatter, rates.scatter);
      rates_.gather = std::max(rates_.gather, rates.gather);
    }
    const int begin = options_.iterations * turn / turns;
    const int end = options_.iterations * (turn + 1) / turns;
    const auto more = slowest_of(group_, time(op, graph_calls, end - begin));
    samples.insert(samples.end(), more.begin(), more.end());
  }
  return {
      .row =
          {.executor = is_on_gpu() ? "cuda" : "cpu",
           .transport = exchange_.config().transport,
           .layout = std::string(layout_name(options_.layout)),
           .dtype = is_fp8() ? "fp8" : std::string(dtype_name(options_.dtype)),
           .ranks = group_.num_ranks(),
           .tokens = routing_.max_tokens(),
           .hidden = options_.hidden,
           .experts = routing_.num_experts,
           .topk = routing_.topk,
           .pad = plan_options().pad_multiple,
           .sms = is_on_gpu() && num_sms_ == 0 ? gpu_sms() : num_sms_,
           .mode = mode_of(graph_calls),
           .us_p50 = percentile(samples, 50),
           .us_p99 = percentile(samples, 99),
           .wire_bytes = op == BenchOp::kCombine ? bytes_.returned
                         : has_rows              ? bytes_.wire
                                                 : 0,
           .logical_bytes = has_rows ? bytes_.logical : 0},
      .samples_us = samples};
}

BenchReport run_bench(const Group& group, const BenchOptions& options) {
  const BenchRouting routing = bench_routing(options, group.num_ranks());
  return CpuBench(group, options, routing).run();
}

}  // namespace weft::program
