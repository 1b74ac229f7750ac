// SPDX-License-Identifier: Apache-2.0
#include "bench/run.hpp"

#include <algorithm>

#include "bench/options.hpp"
#include "cli/progress.hpp"
#include "core/check.hpp"
#include "measure/bench_check.hpp"
#include "measure/limits.hpp"
#include "measure/measure.hpp"
#include "measure/workload.hpp"
#include "plan/file/routing_file.hpp"
#include "plan/random_routing.hpp"
#include "routing/source.hpp"
#include "weft/exchange.hpp"

namespace weft::program {
namespace {

constexpr uint64_t kMadeUpVersions = 4;
constexpr int64_t kFileVersions = 16;

BenchRouting made_up_routing(const BenchOptions& options, int num_ranks) {
  RandomRouting spec =
      random_spec({num_ranks, options.num_tokens, options.num_experts, options.topk, options.skew});
  BenchRouting routing;
  routing.num_experts = options.num_experts;
  routing.topk = options.topk;
  for (uint64_t version = 0; version < kMadeUpVersions; ++version) {
    spec.seed = mix_seed(options.seed, version);
    auto& routes = routing.versions.emplace_back();
    for (int rank = 0; rank < num_ranks; ++rank) {
      routes.push_back(random_routing(spec, rank));
    }
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
  BenchRouting routing;
  routing.num_experts = file.shape().num_experts;
  routing.topk = file.shape().topk;
  const int64_t num_versions = std::min(kFileVersions, file.num_records());
  for (int64_t version = 0; version < num_versions; ++version) {
    routing.versions.push_back(file.read(version * file.num_records() / num_versions).routes);
  }
  return routing;
}

constexpr int64_t kLimitMemoryBytes = 512 << 20;

class Bench {
 public:
  Bench(const Group& group, const BenchOptions& options, const BenchRouting& routing)
      : group_(group),
        options_(options),
        routing_(routing),
        rank_(static_cast<size_t>(group.rank())),
        exchange_(group, config()) {
    for (const auto& routes : routing_.versions) {
      const RouteTable& mine = routes[rank_];
      topk_idx_.push_back(matrix(mine.expert.data(), mine.num_tokens, mine.topk));
      plans_.push_back(exchange_.plan({.topk_idx = topk_idx_.back()}, plan_options()));
      max_rows_ = std::max(max_rows_, plans_.back().num_rows());
    }
    const DType dtype = options_.dtype;
    x_ = bench_tokens(dtype, max_tokens(), options_.hidden, options_.seed, group_.rank());
    y_ = bench_rows(dtype, max_rows_, options_.hidden, options_.seed, group_.rank());
    combined_ = Matrix(dtype, max_tokens(), options_.hidden);
    if (options_.is_staged) {
      plain_rows_ = Matrix(dtype, max_rows_, options_.hidden);
    } else {
      buffer_ = exchange_.allocate(max_rows_, options_.hidden, dtype);
    }
  }

  BenchReport run() {
    BenchReport report;
    if (options_.is_checked) {
      verdict_ = check();
    }
    report.row_bytes = row_bytes();
    report.rates = measure_limit();
    Progress progress("bench", group_.rank() == 0);
    double done = 0;
    for (const auto& [name, op] : kBenchOps) {
      progress.update(done++ / static_cast<double>(kBenchOps.size()), std::string(name));
      if (options_.wants(name)) {
        report.results.push_back(measure(op, report.rates));
        report.results.back().row.op = name;
      }
    }
    return report;
  }

 private:
  [[nodiscard]] int64_t max_tokens() const { return routing_.max_tokens(); }

  [[nodiscard]] ExchangeConfig config() const {
    ExchangeConfig config;
    config.hidden = options_.hidden;
    config.max_tokens = std::max<int64_t>(1, max_tokens());
    config.num_experts = routing_.num_experts;
    config.max_topk = routing_.topk;
    config.transport = options_.transport;
    config.num_threads = options_.threads_per_rank;
    return config;
  }

  [[nodiscard]] PlanOptions plan_options() const { return options_.plan_options(); }

  [[nodiscard]] int64_t row_bytes() const { return options_.hidden * dtype_bytes(options_.dtype); }

  // The first rows of a matrix.
  template <class View>
  static View head(View view, int64_t rows) {
    view.rows = rows;
    return view;
  }

  void dispatch(const Plan& plan, const Tensor& rows) {
    exchange_.dispatch(plan, {.x = head(std::as_const(x_).view(), plan.num_tokens())}, {rows});
  }

  [[nodiscard]] Tensor rows_of(const Plan& plan) {
    return head(options_.is_staged ? plain_rows_.view() : buffer_.tensor(), plan.num_rows());
  }

  void run_once(BenchOp op, size_t version) {
    switch (op) {
      case BenchOp::kPlan:
        static_cast<void>(exchange_.plan({.topk_idx = topk_idx_[version]}, plan_options()));
        return;
      case BenchOp::kDispatch:
        dispatch(plans_[version], rows_of(plans_[version]));
        return;
      case BenchOp::kCombine: {
        const Plan& plan = plans_[version];
        exchange_.combine(
            plan,
            {.rows = head(std::as_const(y_).view(), plan.num_rows())},
            {.x = head(combined_.view(), plan.num_tokens())}
        );
        return;
      }
      case BenchOp::kPlanDispatch: {
        const Plan plan = exchange_.plan({.topk_idx = topk_idx_[version]}, plan_options());
        dispatch(plan, rows_of(plan));
        return;
      }
    }
  }

  Verdict check() {
    const Plan& plan = plans_[0];
    run_once(BenchOp::kDispatch, 0);
    OutputPrints prints = {.rows = fingerprint(rows_of(plan))};
    run_once(BenchOp::kCombine, 0);
    prints.x = fingerprint(head(std::as_const(combined_).view(), plan.num_tokens()));
    const BenchShape shape = {
        .routes = routing_.versions[0],
        .num_experts = routing_.num_experts,
        .options = plan_options(),
        .dtype = options_.dtype,
        .hidden = options_.hidden,
        .seed = options_.seed,
    };
    return judge(group_, shape, plan, prints);
  }

  // Rank 0 measures while the others wait, so that nothing else runs.
  CopyRates measure_limit() {
    const ExchangeBytes bytes = bytes_of_all_ranks();
    CopyShape shape;
    shape.num_ranks = group_.num_ranks();
    shape.threads_per_rank = exchange_.config().num_threads;
    shape.row_bytes = row_bytes();
    shape.copies = std::max(1, static_cast<int>(bytes.logical / std::max(bytes.tokens, 1.0) + 0.5));
    shape.source_bytes = std::min(
        std::max<int64_t>(max_tokens(), 1) * row_bytes(),
        kLimitMemoryBytes / shape.num_ranks / shape.copies
    );
    const CopyRates mine = group_.rank() == 0 ? copy_rates(shape) : CopyRates{};
    return gather(group_, mine)[0];
  }

  // Mean over the versions.
  ExchangeBytes bytes_of_all_ranks() {
    ExchangeBytes mine;
    const auto num_versions = static_cast<double>(plans_.size());
    for (const Plan& plan : plans_) {
      mine.logical += static_cast<double>(plan.logical_bytes(row_bytes())) / num_versions;
      mine.wire += static_cast<double>(plan.wire_bytes(row_bytes())) / num_versions;
      mine.tokens += static_cast<double>(plan.num_tokens() * row_bytes()) / num_versions;
    }
    ExchangeBytes sum;
    for (const ExchangeBytes& one : gather(group_, mine)) {
      sum.logical += one.logical;
      sum.wire += one.wire;
      sum.tokens += one.tokens;
    }
    return sum;
  }

  std::vector<double> take_samples(BenchOp op) {
    std::vector<double> mine;
    for (int i = -options_.warmup; i < options_.iterations; ++i) {
      const auto version = static_cast<size_t>(i + options_.warmup) % plans_.size();
      group_.barrier();
      const Stopwatch watch;
      run_once(op, version);
      const double us = watch.microseconds();
      if (i >= 0) {
        mine.push_back(us);
      }
    }
    return slowest_of(group_, mine);
  }

  BenchResult measure(BenchOp op, const CopyRates& rates) {
    const ExchangeBytes bytes = bytes_of_all_ranks();
    BenchResult result = bench_result(group_, options_, routing_, take_samples(op));
    ResultRow& row = result.row;
    row.transport = exchange_.config().transport;
    row.tokens = max_tokens();
    row.mode = options_.is_staged ? "exact staged" : "exact direct";
    row.checked = is_good(verdict_, op);
    if (op != BenchOp::kPlan) {
      row.wire_bytes = bytes.wire;
      row.logical_bytes = bytes.logical;
      row.limit_us = op == BenchOp::kCombine ? combine_limit_us(bytes, rates)
                                             : dispatch_limit_us(bytes, rates);
    }
    return result;
  }

  const Group& group_;
  const BenchOptions& options_;
  const BenchRouting& routing_;
  size_t rank_;
  Exchange exchange_;
  std::vector<ConstTensor> topk_idx_;  // by version
  std::vector<Plan> plans_;            // by version
  int64_t max_rows_ = 0;
  Matrix x_;
  Matrix y_;
  Matrix combined_;
  Matrix plain_rows_;
  Buffer buffer_;
  Verdict verdict_;
};

}  // namespace

BenchRouting bench_routing(const BenchOptions& options, int num_ranks) {
  return options.routing_file.empty() ? made_up_routing(options, num_ranks)
                                      : file_routing(options.routing_file, num_ranks);
}

bool is_good(const Verdict& verdict, BenchOp op) {
  switch (op) {
    case BenchOp::kPlan:
      return verdict.is_plan_good;
    case BenchOp::kDispatch:
      return verdict.is_dispatch_good;
    case BenchOp::kCombine:
      return verdict.is_combine_good;
    case BenchOp::kPlanDispatch:
      return verdict.is_plan_good && verdict.is_dispatch_good;
  }
  return false;
}

BenchResult bench_result(
    const Group& group,
    const BenchOptions& options,
    const BenchRouting& routing,
    std::vector<double> samples_us
) {
  BenchResult result;
  result.samples_us = std::move(samples_us);
  ResultRow& row = result.row;
  row.layout = layout_name(options.layout);
  row.dtype = dtype_name(options.dtype);
  row.ranks = group.num_ranks();
  row.hidden = options.hidden;
  row.experts = routing.num_experts;
  row.topk = routing.topk;
  row.pad = options.plan_options().pad_multiple;
  row.us_p50 = percentile(result.samples_us, 50);
  row.us_p99 = percentile(result.samples_us, 99);
  return result;
}

BenchReport run_bench(const Group& group, const BenchOptions& options) {
  const BenchRouting routing = bench_routing(options, group.num_ranks());
  return Bench(group, options, routing).run();
}

}  // namespace weft::program
