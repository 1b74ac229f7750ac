// SPDX-License-Identifier: Apache-2.0
#include "moe/block_cuda.hpp"

#include <algorithm>

#include "moe/balance.hpp"

namespace weft::moe {

DeviceBlock::DeviceBlock(GpuRank& rank, const BlockLayout& layout, const DeviceMemory& memory)
    : rank_(&rank),
      gain_(memory.replicated.at(layout.norm)),
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
  const auto num_tokens = static_cast<size_t>(rank.num_tokens());
  const auto num_experts = static_cast<size_t>(rank.config().num_experts);
  const size_t num_routes = num_tokens * static_cast<size_t>(rank.config().topk);
  const size_t num_elements = num_tokens * static_cast<size_t>(rank.config().hidden);
  x_.resize(num_elements);
  inverse_rms_.resize(num_tokens);
  normed_.resize(num_elements);
  probs_.resize(num_tokens * num_experts);
  topk_idx_.resize(num_routes);
  weights_.resize(num_routes);
  prob_sums_.resize(num_experts);
  host_prob_sums_.resize(num_experts);
}

void DeviceBlock::forward(float* x) {
  DeviceScratch& scratch = rank_->scratch();
  rank_->start(Phase::kDense);
  WEFT_CUDA(
      Context{},
      cudaMemcpyAsync(
          x_.data(), x, x_.size() * sizeof(float), cudaMemcpyDeviceToDevice, rank_->stream()
      )
  );
  rmsnorm_forward_cuda(norm(), normed_.data(), rank_->stream());

  rank_->start(Phase::kRoute);
  route();

  rank_->start(Phase::kPlan);
  plan_.reset();  // so that its memory serves the next
  plan_ = rank_->plan(topk_idx_.data());
  rank_->start(Phase::kRoute);
  balance();
  const auto num_rows = static_cast<size_t>(plan().num_rows());
  row_weights_.resize(num_rows);
  scratch.expert_out.resize(num_rows * static_cast<size_t>(rank_->config().hidden));

  rank_->start(Phase::kDispatch);
  rows_ = rank_->dispatch(*plan_, normed_.data(), weights_.data(), row_weights_.data());

  rank_->start(Phase::kExperts);
  experts_.forward(expert_rows(), scratch.expert_out.data());

  rank_->start(Phase::kCombine);
  rank_->combine(*plan_, scratch.expert_out.data(), nullptr, scratch.tokens.data(), nullptr);

  rank_->start(Phase::kDense);
  add_cuda(scratch.tokens.data(), x, static_cast<int64_t>(x_.size()), rank_->stream());
}

void DeviceBlock::backward(float* grad_x) {
  DeviceScratch& scratch = rank_->scratch();
  const auto num_rows = static_cast<size_t>(plan().num_rows());
  rank_->start(Phase::kDispatch);
  to_bf16_cuda(grad_x, scratch.tokens.data(), static_cast<int64_t>(x_.size()), rank_->stream());
  const Buffer grad_out = rank_->dispatch(*plan_, scratch.tokens.data(), nullptr, nullptr);

  rank_->start(Phase::kExperts);
  scratch.expert_out.resize(num_rows * static_cast<size_t>(rank_->config().hidden));
  scratch.row_grads.resize(num_rows);
  experts_.backward(
      expert_rows(),
      reinterpret_cast<const uint16_t*>(grad_out.tensor().data),
      scratch.expert_out.data(),
      scratch.row_grads.data()
  );

  rank_->start(Phase::kCombine);
  rows_ = {};
  rank_->combine(
      *plan_,
      scratch.expert_out.data(),
      scratch.row_grads.data(),
      scratch.tokens.data(),
      scratch.grad_weights.data()
  );

  rank_->start(Phase::kRoute);
  route_backward();

  rank_->start(Phase::kDense);
  rmsnorm_backward_cuda(
      norm(), scratch.grad_normed.data(), grad_x, scratch.gain_terms.data(), rank_->stream()
  );
  column_sums_cuda(
      {scratch.gain_terms.data(),
       rank_->num_tokens(),
       rank_->config().hidden,
       scratch.sum_parts.data(),
       gain_.grad},
      rank_->stream()
  );
}

void DeviceBlock::route() {
  const ModelConfig& model = rank_->config();
  rank_->linear().forward(
      {rank_->num_tokens(), model.hidden, model.num_experts},
      normed_.data(),
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
       rank_->num_tokens(),
       model.num_experts,
       rank_->scratch().sum_parts.data(),
       prob_sums_.data()},
      rank_->stream()
  );
  prob_sums_.download(host_prob_sums_, rank_->stream());
  const Matrix no_tokens(0, model.num_experts);
  balance_grads_ =
      balance_loss(no_tokens, plan().global_routes_per_expert(), rank_->context().global_tokens)
          .grad_probs;
  host_prob_grads_ = balance_grads_;
  std::ranges::for_each(host_prob_grads_, [&](float& grad) { grad *= model.balance_weight; });
  grad_probs_.upload(host_prob_grads_, rank_->stream());
}

void DeviceBlock::route_backward() {
  DeviceScratch& scratch = rank_->scratch();
  const ModelConfig& model = rank_->config();
  const DeviceLinear::Shape shape = {rank_->num_tokens(), model.hidden, model.num_experts};
  router_backward_cuda(
      router(),
      scratch.grad_weights.data(),
      grad_probs_.data(),
      scratch.grad_logits.data(),
      rank_->stream()
  );
  to_float_cuda(
      scratch.tokens.data(),
      scratch.grad_normed.data(),
      static_cast<int64_t>(x_.size()),
      rank_->stream()
  );
  rank_->linear().add_backward_weight(
      shape, scratch.grad_logits.data(), normed_.data(), router_weight_.grad
  );
  rank_->linear().add_backward_input(
      shape, scratch.grad_logits.data(), router_weight_.rounded, scratch.grad_normed.data()
  );
}

NormShape DeviceBlock::norm() {
  return {rank_->num_tokens(), rank_->config().hidden, x_.data(), gain_.value, inverse_rms_.data()};
}

RouterShape DeviceBlock::router() {
  return {
      rank_->num_tokens(),
      rank_->config().num_experts,
      rank_->config().topk,
      probs_.data(),
      topk_idx_.data(),
      weights_.data()};
}

DeviceExpertRows DeviceBlock::expert_rows() const {
  return {
      reinterpret_cast<const uint16_t*>(rows_.tensor().data),
      row_weights_.data(),
      plan().padded_rows_per_expert()};
}

double DeviceBlock::balance_share() const {
  double share = 0;
  for (size_t e = 0; e < balance_grads_.size(); ++e) {
    share += static_cast<double>(balance_grads_[e]) * static_cast<double>(host_prob_sums_[e]);
  }
  return share;
}

std::span<const int32_t> DeviceBlock::topk_idx() {
  host_topk_idx_.resize(plan_ ? topk_idx_.size() : 0);
  topk_idx_.download(host_topk_idx_, rank_->stream());
  rank_->synchronize();
  return host_topk_idx_;
}

std::span<const float> DeviceBlock::weights() {
  host_weights_.resize(plan_ ? weights_.size() : 0);
  weights_.download(host_weights_, rank_->stream());
  rank_->synchronize();
  return host_weights_;
}

}  // namespace weft::moe
