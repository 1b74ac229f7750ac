// SPDX-License-Identifier: Apache-2.0
#include "moe/moe_block.hpp"

#include <algorithm>
#include <functional>

namespace weft::moe {
namespace {

void add(const Matrix& from, Matrix& to) {
  std::ranges::transform(from.span(), to.span(), to.data(), std::plus<>());
}

}  // namespace

MoeBlock::MoeBlock(MoeContext& context, const BlockLayout& layout, const ModelMemory& memory)
    : context_(&context),
      norm_(layout.norm.in(memory.replicated)),
      router_(layout.router.in(memory.replicated), context.config.num_experts, context.config.topk),
      experts_(
          layout.experts_in.in(memory.experts),
          layout.experts_out.in(memory.experts),
          context.config.hidden,
          context.config.expert_hidden
      ) {}

void MoeBlock::forward(Matrix& x) {
  PhaseTimer& timer = context_->timer;
  timer.start(Phase::kDense);
  norm_.forward(x, normed_);

  timer.start(Phase::kRoute);
  router_.forward(normed_, context_->shards);
  const Matrix& weights = router_.weights();

  timer.start(Phase::kPlan);
  const Routing routing = {
      .topk_idx = matrix(router_.topk_idx().data(), weights.rows(), weights.cols())};
  plan_ = context_->exchange.plan(routing, {.layout = Layout::kExpertMajor});
  timer.start(Phase::kRoute);
  balance_ =
      balance_loss(router_.probs(), plan_->global_routes_per_expert(), context_->global_tokens);

  timer.start(Phase::kDispatch);
  row_weights_.resize(static_cast<size_t>(plan_->num_rows()));
  rows_ = dispatch(
      normed_,
      matrix(weights.data(), weights.rows(), weights.cols()),
      matrix(row_weights_.data(), plan_->num_rows(), 1)
  );

  timer.start(Phase::kExperts);
  experts_.forward(expert_rows(), expert_out_);

  timer.start(Phase::kCombine);
  combine(expert_out_, {}, tokens_, {});

  timer.start(Phase::kDense);
  add(tokens_, x);
}

void MoeBlock::backward(Matrix& grad_x) {
  PhaseTimer& timer = context_->timer;
  const Matrix& weights = router_.weights();

  timer.start(Phase::kDispatch);
  const Buffer grad_out = dispatch(grad_x, {}, {});

  timer.start(Phase::kExperts);
  Matrix grad_floats;
  std::vector<float> grad_row_weights;
  experts_.backward(
      expert_rows(), as_rows(grad_out.tensor(), grad_floats), expert_out_, grad_row_weights
  );
  rows_ = {};

  timer.start(Phase::kCombine);
  Matrix grad_weights(weights.rows(), weights.cols());
  combine(
      expert_out_,
      matrix(grad_row_weights.data(), plan_->num_rows(), 1),
      tokens_,
      matrix(grad_weights.data(), weights.rows(), weights.cols())
  );

  timer.start(Phase::kRoute);
  std::vector<float> grad_probs = balance_.grad_probs;
  std::ranges::for_each(grad_probs, [&](float& g) { g *= context_->config.balance_weight; });
  router_.backward(normed_, grad_weights, grad_probs, tokens_, context_->shards);

  timer.start(Phase::kDense);
  norm_.backward(tokens_, grad_x, context_->shards);
}

ExpertRows MoeBlock::expert_rows() {
  return {as_rows(rows_.tensor(), row_floats_), row_weights_, plan_->rows_per_expert()};
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

void MoeBlock::combine(
    const Matrix& rows, const ConstTensor& row_grads, Matrix& x, const Tensor& grads
) {
  const DType dtype = context_->dtype;
  x.resize(plan_->num_tokens(), rows.cols());
  const ConstTensor sent = as_tensor(rows, dtype, bits_);
  std::vector<uint16_t> arrived;
  const Tensor out = tensor_for(x, dtype, arrived);
  context_->exchange.combine(
      *plan_, {.rows = sent, .weights = row_grads}, {.x = out, .weights = grads}
  );
  take_values(out, x);
  context_->combine.count(*plan_, out.row_bytes());
}

}  // namespace weft::moe
