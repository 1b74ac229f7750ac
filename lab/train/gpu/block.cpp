// SPDX-License-Identifier: Apache-2.0
#include "train/gpu/block.hpp"

#include <algorithm>

#include "train/layers/router.hpp"

namespace weft::moe {

using overlap::Lane;

DeviceBlock::DeviceBlock(
    GpuRank& rank, DeviceTokens& tokens, const BlockLayout& layout, const DeviceMemory& memory
)
    : rank_(&rank),
      tokens_(&tokens),
      norm_(rank, tokens, memory.replicated.at(layout.norm)),
      router_weight_(memory.replicated.at(layout.router)),
      experts_(
          rank.linear(),
          {memory.experts.at(layout.experts_in).rounded,
           memory.experts.at(layout.experts_out).rounded,
           memory.experts.at(layout.experts_in).grad,
           memory.experts.at(layout.experts_out).grad},
          rank.config().hidden,
          rank.config().expert_hidden
      ) {
  const auto num_tokens = static_cast<size_t>(tokens.num_tokens);
  const auto num_experts = static_cast<size_t>(rank.config().num_experts);
  const size_t num_routes = num_tokens * static_cast<size_t>(rank.config().topk);
  probs_.resize(num_tokens * num_experts);
  topk_idx_.resize(num_routes);
  weights_.resize(num_routes);
  prob_sums_.resize(num_experts);
  host_prob_sums_.resize(num_experts);
}

void DeviceBlock::pre_dispatch(const DeviceArray<float>& x) {
  rank_->start(Lane::kCompute, Phase::kDense);
  norm_.forward(x.data());
  rank_->start(Lane::kCompute, Phase::kRoute);
  route();
}

void DeviceBlock::moe_dispatch() {
  rank_->start(Lane::kExchange, Phase::kPlan);
  plan_.reset();  // so that its memory serves the next
  plan_ = rank_->plan(tokens_->num_tokens, topk_idx_.data());
  row_weights_.resize(num_rows());

  rank_->start(Lane::kExchange, Phase::kDispatch);
  rows_ = {};
  rows_ = rank_->dispatch(
      *plan_, !tokens_->is_first, norm_.normed(), weights_.data(), row_weights_.data()
  );
}

void DeviceBlock::mlp() {
  rank_->start(Lane::kCompute, Phase::kRoute);
  balance();
  rank_->start(Lane::kCompute, Phase::kExperts);
  tokens_->expert_out.resize(num_rows() * static_cast<size_t>(rank_->config().hidden));
  experts_.forward(expert_rows(), tokens_->expert_out.data());
}

void DeviceBlock::moe_combine(DeviceArray<float>& x) {
  rank_->start(Lane::kExchange, Phase::kCombine);
  rank_->combine(
      *plan_,
      !tokens_->is_first,
      tokens_->expert_out.data(),
      nullptr,
      tokens_->tokens.data(),
      nullptr
  );
  rank_->start(Lane::kExchange, Phase::kDense);
  add_cuda(
      tokens_->tokens.data(),
      x.data(),
      static_cast<int64_t>(norm_.size()),
      rank_->stream(Lane::kExchange)
  );
}

void DeviceBlock::moe_combine_backward(const DeviceArray<float>& grad_x) {
  rank_->start(Lane::kExchange, Phase::kDispatch);
  to_bf16_cuda(
      grad_x.data(),
      tokens_->tokens.data(),
      static_cast<int64_t>(norm_.size()),
      rank_->stream(Lane::kExchange)
  );
  // The block after this one has used them: its last piece came before this one.
  tokens_->grad_rows = {};
  tokens_->grad_rows =
      rank_->dispatch(*plan_, !tokens_->is_last, tokens_->tokens.data(), nullptr, nullptr);
}

void DeviceBlock::mlp_backward() {
  rank_->start(Lane::kCompute, Phase::kExperts);
  tokens_->expert_out.resize(num_rows() * static_cast<size_t>(rank_->config().hidden));
  tokens_->row_grads.resize(num_rows());
  experts_.backward(
      expert_rows(), grad_rows(), tokens_->expert_out.data(), tokens_->row_grads.data()
  );
}

void DeviceBlock::mlp_weight_gradient() {
  rank_->start(Lane::kCompute, Phase::kExperts);
  experts_.add_weight_gradients(expert_rows(), grad_rows());
}

void DeviceBlock::moe_dispatch_backward() {
  rank_->start(Lane::kExchange, Phase::kCombine);
  rank_->combine(
      *plan_,
      !tokens_->is_last,
      tokens_->expert_out.data(),
      tokens_->row_grads.data(),
      tokens_->tokens.data(),
      tokens_->grad_weights.data()
  );
}

void DeviceBlock::pre_dispatch_backward(DeviceArray<float>& grad_x) {
  rank_->start(Lane::kCompute, Phase::kRoute);
  route_backward();
  rank_->start(Lane::kCompute, Phase::kDense);
  norm_.backward(grad_x.data());
}

void DeviceBlock::route() {
  const ModelConfig& model = rank_->config();
  rank_->linear().forward(
      {tokens_->num_tokens, model.hidden, model.num_experts},
      norm_.normed(),
      router_weight_.rounded,
      probs_.data()
  );
  choose_experts_cuda(router(), rank_->stream());
}

// The loss is linear in the probabilities: their sums over the tokens are enough.
void DeviceBlock::balance() {
  const ModelConfig& model = rank_->config();
  column_sums_cuda(
      {probs_.data(),
       tokens_->num_tokens,
       model.num_experts,
       rank_->scratch().sum_parts.data(),
       prob_sums_.data()},
      rank_->stream()
  );
  const Matrix no_tokens(0, model.num_experts);
  balance_grads_ =
      balance_loss(no_tokens, plan().global_routes_per_expert(), rank_->context().global_tokens)
          .grad_probs;
  host_prob_grads_ = balance_grads_;
  std::ranges::for_each(host_prob_grads_, [&](float& grad) { grad *= model.balance_weight; });
  grad_probs_.upload(host_prob_grads_, rank_->stream());
}

void DeviceBlock::finish() {
  prob_sums_.download(host_prob_sums_, rank_->stream());
}

void DeviceBlock::route_backward() {
  DeviceScratch& scratch = rank_->scratch();
  const ModelConfig& model = rank_->config();
  const ProductShape shape = {tokens_->num_tokens, model.hidden, model.num_experts};
  router_backward_cuda(
      router(),
      tokens_->grad_weights.data(),
      grad_probs_.data(),
      scratch.grad_logits.data(),
      rank_->stream()
  );
  to_float_cuda(
      tokens_->tokens.data(),
      scratch.grad_normed.data(),
      static_cast<int64_t>(norm_.size()),
      rank_->stream()
  );
  rank_->linear().add_backward_weight(
      shape, scratch.grad_logits.data(), norm_.normed(), router_weight_.grad
  );
  rank_->linear().add_backward_input(
      shape, scratch.grad_logits.data(), router_weight_.rounded, scratch.grad_normed.data()
  );
}

RouterShape DeviceBlock::router() {
  return {
      tokens_->num_tokens,
      rank_->config().num_experts,
      rank_->config().topk,
      probs_.data(),
      topk_idx_.data(),
      weights_.data()};
}

DeviceExperts::Rows DeviceBlock::expert_rows() const {
  return {
      reinterpret_cast<const uint16_t*>(rows_.tensor().data),
      row_weights_.data(),
      plan().padded_rows_per_expert()};
}

const uint16_t* DeviceBlock::grad_rows() const {
  return reinterpret_cast<const uint16_t*>(tokens_->grad_rows.tensor().data);
}

double DeviceBlock::balance_share() const {
  double share = 0;
  for (size_t e = 0; e < balance_grads_.size(); ++e) {
    share += static_cast<double>(balance_grads_[e]) * static_cast<double>(host_prob_sums_[e]);
  }
  return share;
}

}  // namespace weft::moe
