// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_calls_cuda.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bench/gpu_kernels_cuda.hpp"
#include "core/gpu/check.hpp"
#include "core/gpu/device_memory.hpp"
#include "core/gpu/devices.hpp"
#include "core/half.hpp"
#include "measure/gpu_rows.hpp"
#include "measure/measure.hpp"
#include "measure/workload.hpp"
#include "plan/plan_data.hpp"
#include "plan/reference/reference_plan.hpp"
#include "weft/plan.hpp"
#include "weft/tensor.hpp"

namespace weft::program {
namespace {

constexpr int64_t kScaleGroup = 128;
constexpr int64_t kSampledRows = 256;
constexpr int64_t kSampledTokens = 96;

int num_gpus() {
  return static_cast<int>(list_gpus().gpus.size());
}

// As rows of as many bytes as there were elements: any bytes do.
Tensor as_bytes(Tensor tensor) {
  tensor.dtype = DType::kByte;
  return tensor;
}

// As rows of bf16, which is what launch_fill writes.
Tensor as_bf16(Tensor tensor) {
  tensor.cols = tensor.row_bytes() / static_cast<int64_t>(sizeof(uint16_t));
  tensor.dtype = DType::kBFloat16;
  return tensor;
}

// The first rows.
Tensor head(Tensor tensor, int64_t rows) {
  tensor.rows = rows;
  return tensor;
}

std::vector<uint16_t> read_row(const Tensor& tensor, int64_t row) {
  std::vector<uint16_t> host(static_cast<size_t>(tensor.cols));
  const auto bytes = static_cast<uint64_t>(tensor.row_bytes());
  copy_between(
      reinterpret_cast<std::byte*>(host.data()),
      {},
      tensor.data + row * tensor.row_bytes(),
      tensor.device,
      bytes
  );
  return host;
}

// Of what a rank's tokens, their scales and its experts' rows are filled with by launch_fill.
uint64_t token_seed(int rank) {
  return mix_seed(1, static_cast<uint64_t>(rank));
}

uint64_t expert_seed(int rank) {
  return mix_seed(2, static_cast<uint64_t>(rank));
}

uint64_t scale_seed(int rank) {
  return mix_seed(3, static_cast<uint64_t>(rank));
}

// rows: what `rank` got of rows that each source filled from seed_of(source), seen as bf16 of
// whatever they are; plans: those of all ranks. A sample of them, every element.
bool rows_are_right(
    const Tensor& rows, const std::vector<Plan>& plans, size_t rank, uint64_t (*seed_of)(int source)
) {
  for (size_t source = 0; source < plans.size(); ++source) {
    const Arrivals& arrivals = contents_of(plans[source]).sent[rank];
    const int64_t step = std::max<int64_t>(1, arrivals.size() / kSampledRows);
    for (int64_t i = 0; i < arrivals.size(); i += step) {
      for (const int32_t slot : arrivals.slots(i)) {
        const auto got = read_row(rows, slot);
        const int64_t token = arrivals.token[static_cast<size_t>(i)];
        const uint64_t seed = seed_of(static_cast<int>(source));
        for (int64_t col = 0; col < rows.cols; ++col) {
          if (got[static_cast<size_t>(col)] != float_to_bf16(row_element(seed, token, col))) {
            return false;
          }
        }
      }
    }
  }
  return true;
}

// sums: what combine made of experts' rows made from their seeds, in bf16; plan: of this rank.
bool sums_are_right(const Tensor& sums, const Plan& plan) {
  const PlanData& data = contents_of(plan);
  const int64_t step = std::max<int64_t>(1, plan.num_tokens() / kSampledTokens);
  for (int64_t token = 0; token < plan.num_tokens(); token += step) {
    const auto got = read_row(sums, token);
    const auto t = static_cast<size_t>(token);
    for (int64_t col = 0; col < sums.cols; ++col) {
      float sum = 0;
      for (int32_t i = data.token_begin[t]; i < data.token_begin[t + 1]; ++i) {
        const TokenArrival& arrival = data.token_arrivals[static_cast<size_t>(i)];
        const Arrivals& sent = data.sent[static_cast<size_t>(arrival.rank)];
        const uint64_t seed = expert_seed(arrival.rank);
        float partial = 0;
        bool is_first = true;
        for (const int32_t slot : sent.slots(arrival.index)) {
          const float value = bf16_to_float(float_to_bf16(row_element(seed, slot, col)));
          partial = is_first ? value : partial + value;
          is_first = false;
        }
        partial = bf16_to_float(float_to_bf16(partial));
        sum = i == data.token_begin[t] ? partial : sum + partial;
      }
      if (got[static_cast<size_t>(col)] != float_to_bf16(sum)) {
        return false;
      }
    }
  }
  return true;
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
  return std::max<int64_t>(1, routing_.max_tokens());
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
  return exchange_.plan(routing_of(version), plan_options(max_rows_), call());
}

Plan GpuCalls::plan_and_dispatch(size_t version) {
  const Routing routing = routing_of(version);
  return exchange_.dispatch(
      routing, plan_options(max_rows_), input(routing.topk_idx.rows), output(max_rows_), call()
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

Verdict GpuCalls::check() {
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
  Verdict all = {true, true, true};
  for (const Verdict& one : gather(group_, mine)) {
    all.is_plan_good &= one.is_plan_good;
    all.is_dispatch_good &= one.is_dispatch_good;
    all.is_combine_good &= one.is_combine_good;
  }
  return all;
}

}  // namespace weft::program
