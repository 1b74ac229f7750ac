// SPDX-License-Identifier: Apache-2.0
#include "train/layers/moe_block.hpp"

#include <algorithm>
#include <functional>

namespace weft::moe {
namespace {

using overlap::Lane;

void add(const Matrix& from, Matrix& to) {
  std::ranges::transform(from.span(), to.span(), to.data(), std::plus<>());
}

}  // namespace

MoeBlock::MoeBlock(
    MoeContext& context, const Shards& shards, const BlockLayout& layout, const ModelMemory& memory
)
    : context_(&context),
      shards_(&shards),
      norm_(layout.norm.in(memory.replicated)),
      router_(layout.router.in(memory.replicated), context.config.num_experts, context.config.topk),
      experts_(
          kHostLinear,
          {layout.experts_in.in(memory.experts).value.data(),
           layout.experts_out.in(memory.experts).value.data(),
           layout.experts_in.in(memory.experts).grad.data(),
           layout.experts_out.in(memory.experts).grad.data()},
          context.config.hidden,
          context.config.expert_hidden
      ) {}

void MoeBlock::pre_dispatch(const Matrix& x) {
  start(Lane::kCompute, Phase::kDense);
  norm_.forward(x, normed_);
  start(Lane::kCompute, Phase::kRoute);
  router_.forward(normed_, *shards_);
}

void MoeBlock::moe_dispatch() {
  const Matrix& weights = router_.weights();
  start(Lane::kExchange, Phase::kPlan);
  const Routing routing = {
      .topk_idx = matrix(router_.topk_idx().data(), weights.rows(), weights.cols())};
  plan_ = context_->exchange.plan(routing, {.layout = Layout::kExpertMajor});

  start(Lane::kExchange, Phase::kDispatch);
  row_weights_.resize(static_cast<size_t>(plan_->num_rows()));
  rows_ = dispatch(
      normed_,
      matrix(weights.data(), weights.rows(), weights.cols()),
      matrix(row_weights_.data(), plan_->num_rows(), 1)
  );
}

void MoeBlock::mlp() {
  start(Lane::kCompute, Phase::kRoute);
  balance_ =
      balance_loss(router_.probs(), plan_->global_routes_per_expert(), context_->global_tokens);
  start(Lane::kCompute, Phase::kExperts);
  expert_rows_ = {
      as_rows(rows_.tensor(), row_floats_).data, row_weights_.data(), plan_->rows_per_expert()};
  expert_out_.resize(plan_->num_rows(), context_->config.hidden);
  experts_.forward(expert_rows_, expert_out_.data());
}

void MoeBlock::moe_combine(Matrix& x) {
  start(Lane::kExchange, Phase::kCombine);
  combine({}, {});
  start(Lane::kExchange, Phase::kDense);
  add(tokens_, x);
}

void MoeBlock::moe_combine_backward(const Matrix& grad_x) {
  start(Lane::kExchange, Phase::kDispatch);
  grad_rows_ = dispatch(grad_x, {}, {});
}

void MoeBlock::mlp_backward() {
  start(Lane::kCompute, Phase::kExperts);
  expert_grads_ = as_rows(grad_rows_.tensor(), grad_floats_).data;
  expert_out_.resize(plan_->num_rows(), context_->config.hidden);
  grad_row_weights_.resize(row_weights_.size());
  experts_.backward(expert_rows_, expert_grads_, expert_out_.data(), grad_row_weights_.data());
}

void MoeBlock::mlp_weight_gradient() {
  start(Lane::kCompute, Phase::kExperts);
  experts_.add_weight_gradients(expert_rows_, expert_grads_);
}

void MoeBlock::moe_dispatch_backward() {
  start(Lane::kExchange, Phase::kCombine);
  const Matrix& weights = router_.weights();
  grad_weights_.resize(weights.rows(), weights.cols());
  combine(
      matrix(grad_row_weights_.data(), plan_->num_rows(), 1),
      matrix(grad_weights_.data(), weights.rows(), weights.cols())
  );
}

void MoeBlock::pre_dispatch_backward(Matrix& grad_x) {
  start(Lane::kCompute, Phase::kRoute);
  std::vector<float> grad_probs = balance_.grad_probs;
  std::ranges::for_each(grad_probs, [&](float& g) { g *= context_->config.balance_weight; });
  router_.backward(normed_, grad_weights_, grad_probs, tokens_, *shards_);

  start(Lane::kCompute, Phase::kDense);
  norm_.backward(tokens_, grad_x, *shards_);
}

Buffer MoeBlock::dispatch(const Matrix& x, const ConstTensor& weights, const Tensor& row_weights) {
  Exchange& exchange = context_->exchange;
  Buffer rows = exchange.allocate(plan_->num_rows(), x.cols(), context_->dtype);
  exchange.dispatch(
      *plan_,
      {.x = as_tensor(x, context_->dtype, bits_), .weights = weights},
      {.rows = rows.tensor(), .weights = row_weights}
  );
  context_->dispatch.count(*plan_, rows.tensor().row_bytes());
  return rows;
}

void MoeBlock::combine(const ConstTensor& row_grads, const Tensor& grads) {
  const DType dtype = context_->dtype;
  tokens_.resize(plan_->num_tokens(), expert_out_.cols());
  const ConstTensor sent = as_tensor(expert_out_, dtype, bits_);
  std::vector<uint16_t> arrived;
  const Tensor out = tensor_for(tokens_, dtype, arrived);
  context_->exchange.combine(
      *plan_, {.rows = sent, .weights = row_grads}, {.x = out, .weights = grads}
  );
  take_values(out, tokens_);
  context_->combine.count(*plan_, out.row_bytes());
}

}  // namespace weft::moe
