// SPDX-License-Identifier: Apache-2.0
// One block of the model, x += MoE(norm(x)), and the place to see how the library is used: plan,
// dispatch, experts, combine. Backward of combine is dispatch and backward of dispatch is combine,
// by the same plan. ../step_model.hpp has the blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "train/layers/experts.hpp"
#include "train/rank.hpp"
#include "train/replicas.hpp"

namespace weft::moe {

// One micro-batch, and what its layers overwrite one after the other. Both lanes use it, each piece
// of the micro-batch after the one before it.
struct Tokens {
  Shards shards;
  int64_t num = 0;
  // [num, hidden] what blocks read and write: tokens, in the backward their gradients.
  std::vector<float> x;
  std::vector<float> tokens;           // [num, hidden] on their way out, or come back
  std::vector<float> grad_weights;     // [num, topk]
  std::vector<float> expert_out;       // [num_rows, hidden] of experts: rows or gradients
  std::vector<float> row_grads;        // [num_rows]
  Buffer grad_rows;                    // [num_rows, hidden] gradients as they arrived
  const float* grad_values = nullptr;  // the same as experts take them
  std::vector<float> grad_scratch;

  Tokens(Shards the_shards, const ModelConfig& config)
      : shards(std::move(the_shards)),
        num(shards.back().end),
        x(static_cast<size_t>(num * config.hidden)),
        tokens(x.size()),
        grad_weights(static_cast<size_t>(num * config.topk)) {}
};

// A norm before a layer.
class Norm {
 public:
  // For the tokens of one micro-batch, which outlive it. gain: [hidden].
  Norm(Rank& rank, Tokens& tokens, const Weight& gain)
      : rank_(&rank),
        tokens_(&tokens),
        gain_(gain),
        x_(static_cast<size_t>(size())),
        inverse_rms_(static_cast<size_t>(tokens.num)),
        normed_(x_.size()) {}

  // Keeps a copy of the tokens' x.
  void forward() {
    x_ = tokens_->x;
    rank_->math().norm(shape(), normed_.data());
  }
  // Adds the gradient for x to the tokens' x, from that for normed() in the scratch memory.
  void backward() {
    const float* grad_normed = rank_->scratch().grad_normed.data();
    rank_->math().norm_backward(shape(), grad_normed, tokens_->x.data(), gain_, tokens_->shards);
  }

  [[nodiscard]] const float* normed() const { return normed_.data(); }  // [tokens, hidden]
  [[nodiscard]] int64_t size() const { return tokens_->num * rank_->config().hidden; }

 private:
  [[nodiscard]] NormShape shape() {
    return {tokens_->num, rank_->config().hidden, x_.data(), gain_.value, inverse_rms_.data()};
  }

  Rank* rank_;
  Tokens* tokens_;
  Weight gain_;
  std::vector<float> x_;
  std::vector<float> inverse_rms_;  // [num_tokens]
  std::vector<float> normed_;
};

// Products of all tokens with w [out, hidden], shard by shard.
class Linear {
 public:
  // For the tokens of one micro-batch, which outlive it.
  Linear(Rank& rank, const Tokens& tokens, const Weight& weight, int64_t out)
      : math_(&rank.math()),
        shards_(&tokens.shards),
        weight_(weight),
        hidden_(rank.config().hidden),
        out_(out) {}

  // y [num_tokens, out] = x [num_tokens, hidden] * w^T.
  void forward(const float* x, float* y) {
    for (const Range& shard : *shards_) {
      math_->forward(shape(shard), x + shard.begin * hidden_, weight_.value, y + at(shard));
    }
  }
  // grad_x += grad_y * w; adds to the gradient of w.
  void backward(const float* grad_y, const float* x, float* grad_x) {
    for (size_t i = 0; i < shards_->size(); ++i) {
      const Range& shard = (*shards_)[i];
      const float* grads = grad_y + at(shard);
      const int64_t first = shard.begin * hidden_;
      math_->add_backward_weight(shape(shard), grads, x + first, weight_.grad_of(i));
      math_->add_backward_input(shape(shard), grads, weight_.value, grad_x + first);
    }
  }

 private:
  [[nodiscard]] ProductShape shape(const Range& shard) const {
    return {shard.size(), hidden_, out_};
  }
  [[nodiscard]] int64_t at(const Range& shard) const { return shard.begin * out_; }

  Math* math_;
  const Shards* shards_;
  Weight weight_;
  int64_t hidden_;
  int64_t out_;
};

class Block {
 public:
  // For the tokens of one micro-batch, which outlive it.
  Block(Rank& rank, Tokens& tokens, const BlockLayout& layout, const Weights& weights)
      : rank_(&rank),
        tokens_(&tokens),
        norm_(rank, tokens, weights.replicated.at(layout.norm)),
        router_(rank, tokens, weights.replicated.at(layout.router), rank.config().num_experts),
        experts_(
            rank.math(),
            {weights.experts.at(layout.experts_in).value,
             weights.experts.at(layout.experts_out).value,
             weights.experts.at(layout.experts_in).grad,
             weights.experts.at(layout.experts_out).grad},
            rank.config().hidden,
            rank.config().expert_hidden
        ),
        probs_(static_cast<size_t>(tokens.num * rank.config().num_experts)),
        topk_idx_(static_cast<size_t>(tokens.num * rank.config().topk)),
        weights_(topk_idx_.size()),
        prob_sums_(static_cast<size_t>(rank.config().num_experts)) {}

  // The pieces of forward and backward, in their order, each named for the node of a layer that it
  // is in a schedule. Only those that move tokens call the exchange, and are collective.
  void pre_dispatch() {
    rank_->start(Lane::kCompute, Phase::kDense);
    norm_.forward();
    rank_->start(Lane::kCompute, Phase::kRoute);
    router_.forward(norm_.normed(), probs_.data());
    rank_->math().choose_experts(routes());
  }

  void moe_dispatch() {
    rank_->start(Lane::kExchange, Phase::kPlan);
    plan_.reset();  // so that its memory serves the next
    plan_ = rank_->plan(tokens_->num, topk_idx_.data());
    row_weights_.resize(num_rows());
    if (has_replicas()) {
      rank_->start(Lane::kExchange, Phase::kReduce);
      replicas_.bring(*rank_, plan(), experts_.weights());
    }

    rank_->start(Lane::kExchange, Phase::kDispatch);
    rows_ = {};
    const TravellingWeights weights = {weights_.data(), row_weights_.data()};
    rows_ = rank_->dispatch(*plan_, norm_.normed(), weights);
  }

  void mlp() {
    rank_->start(Lane::kCompute, Phase::kRoute);
    balance();
    rank_->start(Lane::kCompute, Phase::kExperts);
    expert_rows_ = {
        rank_->values(rows_, row_scratch_), row_weights_.data(), plan().padded_rows_per_expert()};
    expert_rows_.replicas = replicas_.places();
    tokens_->expert_out.resize(num_rows() * static_cast<size_t>(rank_->config().hidden));
    experts_.forward(expert_rows_, tokens_->expert_out.data());
  }

  void moe_combine() {
    rank_->start(Lane::kExchange, Phase::kCombine);
    rank_->combine(*plan_, tokens_->expert_out.data(), tokens_->tokens.data());
    rank_->start(Lane::kExchange, Phase::kDense);
    Math::add(tokens_->tokens.data(), tokens_->x.data(), norm_.size());
  }

  void moe_combine_backward() {
    rank_->start(Lane::kExchange, Phase::kDispatch);
    tokens_->tokens = tokens_->x;
    // The block after this one has used them: its last piece came before this one.
    tokens_->grad_rows = {};
    tokens_->grad_rows = rank_->dispatch(*plan_, tokens_->tokens.data());
  }

  void mlp_backward() {
    rank_->start(Lane::kCompute, Phase::kExperts);
    tokens_->grad_values = rank_->values(tokens_->grad_rows, tokens_->grad_scratch);
    tokens_->expert_out.resize(num_rows() * static_cast<size_t>(rank_->config().hidden));
    tokens_->row_grads.resize(num_rows());
    experts_.backward(
        expert_rows_, tokens_->grad_values, tokens_->expert_out.data(), tokens_->row_grads.data()
    );
    // The next exchange takes them to their masters.
    experts_.add_replica_gradients(expert_rows_, tokens_->grad_values);
  }

  // Any time between its neighbours. Gives back the rows that the block was sent.
  void mlp_weight_gradient() {
    rank_->start(Lane::kCompute, Phase::kExperts);
    experts_.add_weight_gradients(expert_rows_, tokens_->grad_values);
    release();
  }
  void mlp_whole_backward() {
    mlp_backward();
    mlp_weight_gradient();
  }

  void moe_dispatch_backward() {
    if (has_replicas()) {
      rank_->start(Lane::kExchange, Phase::kReduce);
      replicas_.return_gradients(*rank_);
    }
    rank_->start(Lane::kExchange, Phase::kCombine);
    rank_->combine(
        *plan_,
        tokens_->expert_out.data(),
        tokens_->tokens.data(),
        TravellingWeights{tokens_->row_grads.data(), tokens_->grad_weights.data()}
    );
  }

  void pre_dispatch_backward() {
    if (has_replicas()) {  // on the lane that has added the masters' own to them
      rank_->start(Lane::kCompute, Phase::kReduce);
      replicas_.add_to_masters();
    }
    Scratch& scratch = rank_->scratch();
    rank_->start(Lane::kCompute, Phase::kRoute);
    rank_->math().router_backward(
        routes(), tokens_->grad_weights.data(), grad_probs_.data(), scratch.grad_logits.data()
    );
    std::ranges::copy(tokens_->tokens, scratch.grad_normed.begin());
    router_.backward(scratch.grad_logits.data(), norm_.normed(), scratch.grad_normed.data());
    rank_->start(Lane::kCompute, Phase::kDense);
    norm_.backward();
  }

  // Both lanes are through and no backward will come.
  void release() {
    rows_ = {};
    tokens_->grad_rows = {};
  }

  // Results of the last forward.
  [[nodiscard]] const Plan& plan() const { return plan_->plan; }
  [[nodiscard]] double balance_share() const {
    return moe::balance_share(std::span(balance_grads_), std::span<const double>(prob_sums_));
  }
  // [num_tokens, topk]; empty before the first forward.
  [[nodiscard]] std::span<const int32_t> topk_idx() const {
    return plan_ ? std::span<const int32_t>(topk_idx_) : std::span<const int32_t>();
  }

 private:
  using Lane = overlap::Lane;

  [[nodiscard]] RouterShape routes() {
    const ModelConfig& config = rank_->config();
    return {
        tokens_->num,
        config.num_experts,
        config.topk,
        probs_.data(),
        topk_idx_.data(),
        weights_.data()};
  }
  [[nodiscard]] bool has_replicas() const { return rank_->context().replicas > 0; }
  [[nodiscard]] size_t num_rows() const { return static_cast<size_t>(plan().num_rows()); }

  // The loss is linear in the probabilities: their sums over the tokens are enough.
  void balance() {
    const ModelConfig& config = rank_->config();
    rank_->math().column_sums(probs_.data(), tokens_->num, config.num_experts, prob_sums_.data());
    balance_grads_ = balance_gradients(plan().routes_per_expert(), rank_->context().global_tokens);
    grad_probs_.clear();
    for (const double grad : balance_grads_) {
      grad_probs_.push_back(static_cast<float>(grad) * config.balance_weight);
    }
  }

  Rank* rank_;
  Tokens* tokens_;
  Norm norm_;
  Linear router_;  // [num_experts, hidden]
  Experts experts_;
  Replicas replicas_;

  // Values that forward keeps for backward.
  std::vector<float> probs_;       // [num_tokens, num_experts]
  std::vector<int32_t> topk_idx_;  // [num_tokens, topk]
  std::vector<float> weights_;     // [num_tokens, topk]
  std::optional<CountedPlan> plan_;
  Buffer rows_;                     // [num_rows, hidden] as they arrived
  std::vector<float> row_weights_;  // [num_rows]
  Experts::Rows expert_rows_;       // both, as experts take them
  std::vector<float> row_scratch_;
  std::vector<float> grad_probs_;      // [num_experts] of the balancing loss, weighted
  std::vector<double> prob_sums_;      // [num_experts] over the tokens
  std::vector<double> balance_grads_;  // [num_experts] of the balancing loss
};

}  // namespace weft::moe
