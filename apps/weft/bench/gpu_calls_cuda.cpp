// SPDX-License-Identifier: Apache-2.0
#include "gpu_bench_calls_cuda.hpp"

#include <algorithm>
#include <cstring>

#include "core/check_cuda.hpp"
#include "core/device_memory.hpp"
#include "core/devices.hpp"
#include "gpu_bench_check_cuda.hpp"
#include "gpu_bench_kernels_cuda.hpp"
#include "gpu_bench_views.hpp"
#include "plan/reference_plan.hpp"
#include "workload.hpp"

namespace weft::program {
namespace {

constexpr int64_t kScaleGroup = 128;

int num_gpus() {
  return static_cast<int>(list_gpus().gpus.size());
}

}  // namespace

GpuCalls::GpuCalls(const Group& group, const BenchOptions& options, const BenchRouting& routing)
    : group_(group),
      options_(options),
      routing_(routing),
      rank_(static_cast<size_t>(group.rank())),
      device_{Device::Kind::kCuda, group.rank() % std::max<int>(1, num_gpus())},
      own_stream_(device_.index),
      exchange_(group, config()) {
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
  launch_fill(tokens.data, tokens.rows, tokens.cols, token_seed(group.rank()), stream());
  if (options_.is_fp8) {
    const Tensor scales = as_bf16(scales_);
    launch_fill(scales.data, scales.rows, scales.cols, scale_seed(group.rank()), stream());
  }
  launch_fill(experts_.data, experts_.rows, experts_.cols, expert_seed(group.rank()), stream());
  WEFT_CUDA(Context{}, cudaStreamSynchronize(stream()));
}

int64_t GpuCalls::row_bytes() const {
  const int64_t scales = options_.hidden / kScaleGroup * static_cast<int64_t>(sizeof(float));
  return options_.is_fp8 ? options_.hidden + scales : options_.hidden * dtype_bytes(options_.dtype);
}

int64_t GpuCalls::max_tokens() const {
  int64_t most = 1;
  for (const auto& routes : routing_.versions) {
    for (const RouteTable& table : routes) {
      most = std::max(most, table.num_tokens);
    }
  }
  return most;
}

ExchangeConfig GpuCalls::config() const {
  ExchangeConfig config;
  config.hidden = options_.hidden;
  config.max_tokens = max_tokens();
  config.num_experts = routing_.num_experts;
  config.max_topk = routing_.topk;
  config.device = device_;
  config.mover = options_.mover;
  config.copy_engines = options_.is_copied;
  config.timeout = std::chrono::seconds(10);
  return config;
}

PlanOptions GpuCalls::plan_options() const {
  return {
      .layout = options_.layout,
      .pad_multiple = options_.layout == Layout::kRankMajor ? 1 : options_.pad_multiple,
  };
}

Routing GpuCalls::routing_of(size_t version) const {
  const RouteTable& mine = routing_.versions[version][rank_];
  return {
      .topk_idx = {
          .data = indices_[version].get(),
          .dtype = DType::kInt64,
          .rows = mine.num_tokens,
          .cols = mine.topk,
          .device = device_}};
}

Tensor GpuCalls::plain(int64_t rows, int64_t cols, DType dtype) {
  Tensor tensor = {.dtype = dtype, .rows = rows, .cols = cols};
  tensor.device = device_;
  memory_.push_back(allocate_on(device_, static_cast<uint64_t>(tensor.num_bytes())));
  tensor.data = memory_.back().get();
  return tensor;
}

DispatchInput GpuCalls::input(int64_t num_tokens) const {
  const Tensor x = head(x_, num_tokens);
  if (options_.is_fp8) {
    return {.x = as_bytes(x), .scales = head(scales_, num_tokens)};
  }
  return {.x = x};
}

DispatchOutput GpuCalls::output(int64_t num_rows) const {
  const Tensor rows = head(options_.is_staged ? staged_rows_ : rows_.tensor(), num_rows);
  if (options_.is_fp8) {
    return {.rows = as_bytes(rows), .scales = head(row_scales_, num_rows)};
  }
  return {.rows = rows};
}

void GpuCalls::dispatch(const Plan& plan) {
  exchange_.dispatch(plan, input(plan.num_tokens()), output(plan.num_rows()), call());
}

Plan GpuCalls::plan_in_budget(size_t version) {
  PlanOptions options = plan_options();
  options.row_budget = max_rows_;
  return exchange_.plan(routing_of(version), options, call());
}

Plan GpuCalls::plan_and_dispatch(size_t version) {
  PlanOptions options = plan_options();
  options.row_budget = max_rows_;
  const Routing routing = routing_of(version);
  return exchange_.dispatch(
      routing, options, input(routing.topk_idx.rows), output(max_rows_), call()
  );
}

void GpuCalls::combine(const Plan& plan) {
  exchange_.combine(
      plan, {.rows = head(experts_, plan.num_rows())}, {.x = head(out_, plan.num_tokens())}, call()
  );
}

void GpuCalls::run(BenchOp op, size_t version) {
  switch (op) {
    case BenchOp::kPlan:
      static_cast<void>(exchange_.plan(routing_of(version), plan_options(), call()));
      return;
    case BenchOp::kDispatch:
      dispatch(plans_[version]);
      return;
    case BenchOp::kCombine:
      combine(plans_[version]);
      return;
    case BenchOp::kPlanDispatch:
      dispatch(exchange_.plan(routing_of(version), plan_options(), call()));
      return;
  }
}

bool GpuCalls::is_dispatch_right(const std::vector<Plan>& expected) const {
  const Tensor& rows = options_.is_staged ? staged_rows_ : rows_.tensor();
  if (!options_.is_fp8) {
    return rows_are_right(rows, expected, rank_, token_seed);
  }
  return rows_are_right(as_bf16(as_bytes(rows)), expected, rank_, token_seed) &&
         rows_are_right(as_bf16(row_scales_), expected, rank_, scale_seed);
}

GpuCalls::Verdict GpuCalls::check() {
  std::vector<Plan> expected;
  for (PlanData& data :
       reference_plans(routing_.versions[0], routing_.num_experts, plan_options())) {
    expected.emplace_back(std::make_shared<const PlanData>(std::move(data)));
  }
  launch_fill(rows_.tensor().data, max_rows_, options_.hidden, 77, stream());
  run(BenchOp::kDispatch, 0);
  run(BenchOp::kCombine, 0);
  WEFT_CUDA(Context{}, cudaStreamSynchronize(stream()));
  exchange_.check();
  Verdict mine = {
      plans_[0] == expected[rank_],
      is_dispatch_right(expected),
      sums_are_right(out_, expected[rank_])};
  if (options_.is_graph) {
    launch_fill(rows_.tensor().data, max_rows_, options_.hidden, 77, stream());
    static_cast<void>(plan_and_dispatch(0));
    WEFT_CUDA(Context{}, cudaStreamSynchronize(stream()));
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

}  // namespace weft::program
