// SPDX-License-Identifier: Apache-2.0
#include "train/rank.hpp"

#include <algorithm>
#include <span>

#include "core/check.hpp"
#include "core/half.hpp"

namespace weft::moe {
namespace {

// fp32 values as a tensor of the type that travels: themselves, or converted into `bits`.
ConstTensor as_tensor(
    const float* values, int64_t rows, int64_t cols, DType dtype, std::vector<uint16_t>& bits
) {
  if (dtype == DType::kFloat32) {
    return matrix(values, rows, cols);
  }
  WEFT_ASSERT(dtype == DType::kBFloat16);
  bits.resize(static_cast<size_t>(rows * cols));
  std::transform(values, values + bits.size(), bits.begin(), float_to_bf16);
  return {reinterpret_cast<const std::byte*>(bits.data()), dtype, rows, cols};
}

}  // namespace

CountedPlan Rank::plan(int64_t num_tokens, const int32_t* topk_idx) {
  Plan plan = context_->exchange.plan(
      {.topk_idx = matrix(topk_idx, num_tokens, config().topk)}, context_->plan_options()
  );
  const int64_t wire_rows = plan.wire_bytes(1);
  const int64_t logical_rows = plan.logical_bytes(1);
  return {std::move(plan), num_tokens, wire_rows, logical_rows};
}

Buffer Rank::dispatch(
    const CountedPlan& counted, const float* x, const std::optional<TravellingWeights>& weights
) {
  const int64_t num_rows = counted.plan.num_rows();
  Buffer rows = context_->exchange.allocate(num_rows, config().hidden, context_->dtype);
  DispatchInput in = {
      .x = as_tensor(x, counted.num_tokens, config().hidden, context_->dtype, sent_)};
  DispatchOutput out = {.rows = rows.tensor()};
  if (weights) {
    in.weights = matrix(weights->from, counted.num_tokens, config().topk);
    out.weights = matrix(weights->to, num_rows, 1);
  }
  context_->exchange.dispatch(counted.plan, in, out);
  context_->dispatch.count(counted, rows.tensor().row_bytes());
  return rows;
}

void Rank::combine(
    const CountedPlan& counted,
    const float* rows,
    float* x,
    const std::optional<TravellingWeights>& weights
) {
  const int64_t num_rows = counted.plan.num_rows();
  const DType dtype = context_->dtype;
  CombineInput in = {.rows = as_tensor(rows, num_rows, config().hidden, dtype, sent_)};
  CombineOutput out = {.x = matrix(x, counted.num_tokens, config().hidden)};
  if (dtype != DType::kFloat32) {
    arrived_.resize(static_cast<size_t>(out.x.rows * out.x.cols));
    out.x = {reinterpret_cast<std::byte*>(arrived_.data()), dtype, out.x.rows, out.x.cols};
  }
  if (weights) {
    in.weights = matrix(weights->from, num_rows, 1);
    out.weights = matrix(weights->to, counted.num_tokens, config().topk);
  }
  context_->exchange.combine(counted.plan, in, out);
  if (dtype != DType::kFloat32) {
    std::ranges::transform(arrived_, x, bf16_to_float);
  }
  context_->combine.count(counted, out.x.row_bytes());
}

Plan Rank::plan_weights(int64_t num_tokens, const std::vector<int32_t>& topk_idx) {
  Exchange& exchange = *context_->replica_exchange;
  return exchange.plan(
      {.topk_idx = matrix(topk_idx.data(), num_tokens, exchange.config().max_topk)},
      {.layout = Layout::kExpertMajor, .order = SumOrder::kTopk}
  );
}

void Rank::send_weights(const Plan& moves, const float* from, float* to) {
  context_->replica_exchange->dispatch(
      moves,
      {.x = matrix(from, moves.num_tokens(), config().hidden)},
      {.rows = matrix(to, moves.num_rows(), config().hidden)}
  );
}

void Rank::sum_gradients(const Plan& moves, const float* from, float* to) {
  context_->replica_exchange->combine(
      moves,
      {.rows = matrix(from, moves.num_rows(), config().hidden)},
      {.x = matrix(to, moves.num_tokens(), config().hidden)}
  );
}

const float* Rank::values(const Buffer& rows, std::vector<float>& scratch) const {
  const Tensor tensor = rows.tensor();
  if (tensor.dtype == DType::kFloat32) {
    return reinterpret_cast<const float*>(tensor.data);
  }
  scratch.resize(static_cast<size_t>(tensor.rows * tensor.cols));
  const std::span bits(reinterpret_cast<const uint16_t*>(tensor.data), scratch.size());
  std::ranges::transform(bits, scratch.begin(), bf16_to_float);
  return scratch.data();
}

}  // namespace weft::moe
