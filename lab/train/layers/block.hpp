// SPDX-License-Identifier: Apache-2.0
// One block of the model, x += MoE(norm(x)), and the place to see how the library is used: plan,
// dispatch, experts, combine. Backward of combine is dispatch and backward of dispatch is combine,
// by the same plan. Rank: HostRank (../rank.hpp) or GpuRank (../gpu/rank.hpp), where each piece
// queues its work on the stream of its lane. ../step_model.hpp has the blocks.
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

template <class Rank>
using ValueOf = typename Rank::Math::Value;
template <class Rank, class T>
using ArrayOf = typename Rank::Math::template Array<T>;

// One micro-batch, and what its layers overwrite one after the other. Both lanes use it, each piece
// of the micro-batch after the one before it.
template <class Rank>
struct Tokens {
  Shards shards;
  int64_t num = 0;
  // Of the micro-batches in a step. With overlap no computation runs at the same time as the
  // forward of the first and the backward of the last.
  bool is_first = true;
  bool is_last = true;
  // [num, hidden] what blocks read and write: tokens, in the backward their gradients.
  ArrayOf<Rank, float> x;
  ArrayOf<Rank, ValueOf<Rank>> tokens;         // [num, hidden] on their way out, or come back
  ArrayOf<Rank, float> grad_weights;           // [num, topk]
  ArrayOf<Rank, ValueOf<Rank>> expert_out;     // [num_rows, hidden] of experts: rows or gradients
  ArrayOf<Rank, float> row_grads;              // [num_rows]
  Buffer grad_rows;                            // [num_rows, hidden] gradients as they arrived
  const ValueOf<Rank>* grad_values = nullptr;  // the same as experts take them
  ArrayOf<Rank, ValueOf<Rank>> grad_scratch;

  Tokens(Shards the_shards, bool comes_first, bool comes_last, const ModelConfig& config)
      : shards(std::move(the_shards)),
        num(shards.back().end),
        is_first(comes_first),
        is_last(comes_last),
        x(static_cast<size_t>(num * config.hidden)),
        tokens(x.size()),
        grad_weights(static_cast<size_t>(num * config.topk)) {}
};

// A norm before a layer.
template <class Rank>
class Norm {
 public:
  // For the tokens of one micro-batch, which outlive it. gain: [hidden].
  Norm(Rank& rank, Tokens<Rank>& tokens, const Weight<ValueOf<Rank>>& gain)
      : rank_(&rank),
        tokens_(&tokens),
        gain_(gain),
        x_(static_cast<size_t>(size())),
        inverse_rms_(static_cast<size_t>(tokens.num)),
        normed_(x_.size()) {}

  // Keeps a copy of the tokens' x.
  void forward() {
    rank_->math().copy(tokens_->x.data(), x_);
    rank_->math().norm(shape(), normed_.data());
  }
  // Adds the gradient for x to the tokens' x, from that for normed() in the scratch memory.
  void backward() {
    const float* grad_normed = rank_->scratch().grad_normed.data();
    rank_->math().norm_backward(shape(), grad_normed, tokens_->x.data(), gain_, tokens_->shards);
  }

  [[nodiscard]] const ValueOf<Rank>* normed() const { return normed_.data(); }  // [tokens, hidden]
  [[nodiscard]] int64_t size() const { return tokens_->num * rank_->config().hidden; }

 private:
  [[nodiscard]] NormShape shape() {
    return {tokens_->num, rank_->config().hidden, x_.data(), gain_.value, inverse_rms_.data()};
  }

  Rank* rank_;
  Tokens<Rank>* tokens_;
  Weight<ValueOf<Rank>> gain_;
  ArrayOf<Rank, float> x_;
  ArrayOf<Rank, float> inverse_rms_;  // [num_tokens]
  ArrayOf<Rank, ValueOf<Rank>> normed_;
};

// Products of all tokens with w [out, hidden], shard by shard.
template <class Rank>
class Linear {
 public:
  // For the tokens of one micro-batch, which outlive it.
  Linear(Rank& rank, const Tokens<Rank>& tokens, const Weight<ValueOf<Rank>>& weight, int64_t out)
      : math_(&rank.math()),
        shards_(&tokens.shards),
        weight_(weight),
        hidden_(rank.config().hidden),
        out_(out) {}

  // y [num_tokens, out] = x [num_tokens, hidden] * w^T.
  void forward(const ValueOf<Rank>* x, float* y) {
    for (const Range& shard : *shards_) {
      math_->forward(shape(shard), x + shard.begin * hidden_, weight_.factor, y + at(shard));
    }
  }
  // grad_x += grad_y * w; adds to the gradient of w.
  void backward(const ValueOf<Rank>* grad_y, const ValueOf<Rank>* x, float* grad_x) {
    for (size_t i = 0; i < shards_->size(); ++i) {
      const Range& shard = (*shards_)[i];
      const ValueOf<Rank>* grads = grad_y + at(shard);
      const int64_t first = shard.begin * hidden_;
      math_->add_backward_weight(shape(shard), grads, x + first, weight_.grad_of(i));
      math_->add_backward_input(shape(shard), grads, weight_.factor, grad_x + first);
    }
  }

 private:
  [[nodiscard]] ProductShape shape(const Range& shard) const {
    return {shard.size(), hidden_, out_};
  }
  [[nodiscard]] int64_t at(const Range& shard) const { return shard.begin * out_; }

  typename Rank::Math* math_;
  const Shards* shards_;
  Weight<ValueOf<Rank>> weight_;
  int64_t hidden_;
  int64_t out_;
};

template <class Rank>
class Block {
 public:
  using Value = ValueOf<Rank>;
  template <class T>
  using Array = ArrayOf<Rank, T>;

  // For the tokens of one micro-batch, which outlive it.
  Block(Rank& rank, Tokens<Rank>& tokens, const BlockLayout& layout, const Weights<Value>& weights)
      : rank_(&rank),
        tokens_(&tokens),
        norm_(rank, tokens, weights.replicated.at(layout.norm)),
        router_(rank, tokens, weights.replicated.at(layout.router), rank.config().num_experts),
        experts_(
            rank.math(),
            {weights.experts.at(layout.experts_in).factor,
             weights.experts.at(layout.experts_out).factor,
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
      replicas_.bring(*rank_, !tokens_->is_first, plan(), experts_.weights());
    }

    rank_->start(Lane::kExchange, Phase::kDispatch);
    rows_ = {};
    const TravellingWeights weights = {weights_.data(), row_weights_.data()};
    rows_ = rank_->dispatch(*plan_, !tokens_->is_first, norm_.normed(), weights);
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
    rank_->combine(*plan_, !tokens_->is_first, tokens_->expert_out.data(), tokens_->tokens.data());
    rank_->start(Lane::kExchange, Phase::kDense);
    rank_->add(tokens_->tokens.data(), tokens_->x.data(), norm_.size());
  }

  void moe_combine_backward() {
    rank_->start(Lane::kExchange, Phase::kDispatch);
    rank_->round(tokens_->x.data(), tokens_->tokens.data(), norm_.size());
    // The block after this one has used them: its last piece came before this one.
    tokens_->grad_rows = {};
    tokens_->grad_rows = rank_->dispatch(*plan_, !tokens_->is_last, tokens_->tokens.data());
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

  // Any time between its neighbours. Gives back the rows that the block was sent; on a GPU the
  // streams may still use them: there they go when the next ones come, or by release().
  void mlp_weight_gradient() {
    rank_->start(Lane::kCompute, Phase::kExperts);
    experts_.add_weight_gradients(expert_rows_, tokens_->grad_values);
    if constexpr (Rank::kReleasesRows) {
      release();
    }
  }
  void mlp_whole_backward() {
    mlp_backward();
    mlp_weight_gradient();
  }

  void moe_dispatch_backward() {
    if (has_replicas()) {
      rank_->start(Lane::kExchange, Phase::kReduce);
      replicas_.return_gradients(*rank_, !tokens_->is_last);
    }
    rank_->start(Lane::kExchange, Phase::kCombine);
    rank_->combine(
        *plan_,
        !tokens_->is_last,
        tokens_->expert_out.data(),
        tokens_->tokens.data(),
        TravellingWeights{tokens_->row_grads.data(), tokens_->grad_weights.data()}
    );
  }

  void pre_dispatch_backward() {
    if (has_replicas()) {  // on the lane that has added the masters' own to them
      rank_->start(Lane::kCompute, Phase::kReduce);
      replicas_.add_to_masters(rank_->math());
    }
    Scratch<typename Rank::Math>& scratch = rank_->scratch();
    rank_->start(Lane::kCompute, Phase::kRoute);
    rank_->math().router_backward(
        routes(), tokens_->grad_weights.data(), grad_probs_.data(), scratch.grad_logits.data()
    );
    rank_->math().widen(tokens_->tokens.data(), scratch.grad_normed.data(), norm_.size());
    router_.backward(scratch.grad_logits.data(), norm_.normed(), scratch.grad_normed.data());
    rank_->start(Lane::kCompute, Phase::kDense);
    norm_.backward();
  }

  // Both lanes are through and no backward will come.
  void release() {
    rows_ = {};
    tokens_->grad_rows = {};
  }

  // Fetches what balance_share() needs; it is there once the compute lane is through.
  void finish() { rank_->math().download(prob_sums_, host_prob_sums_); }

  // Results of the last forward.
  [[nodiscard]] const Plan& plan() const { return plan_->plan; }
  [[nodiscard]] double balance_share() const {
    return moe::balance_share(std::span(balance_grads_), std::span(host_prob_sums_));
  }
  // [num_tokens, topk] in the host's memory; empty before the first forward.
  [[nodiscard]] std::span<const int32_t> topk_idx() {
    if (plan_) {
      rank_->fetch(topk_idx_, host_topk_idx_);
    }
    return host_topk_idx_;
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
    host_grad_probs_.clear();
    for (const double grad : balance_grads_) {
      host_grad_probs_.push_back(static_cast<float>(grad) * config.balance_weight);
    }
    rank_->math().upload(std::span<const float>(host_grad_probs_), grad_probs_);
  }

  Rank* rank_;
  Tokens<Rank>* tokens_;
  Norm<Rank> norm_;
  Linear<Rank> router_;  // [num_experts, hidden]
  Experts<typename Rank::Math> experts_;
  Replicas<Rank> replicas_;

  // What forward keeps for backward.
  Array<float> probs_;       // [num_tokens, num_experts]
  Array<int32_t> topk_idx_;  // [num_tokens, topk]
  Array<float> weights_;     // [num_tokens, topk]
  std::optional<CountedPlan> plan_;
  Buffer rows_;                                              // [num_rows, hidden] as they arrived
  Array<float> row_weights_;                                 // [num_rows]
  typename Experts<typename Rank::Math>::Rows expert_rows_;  // both, as experts take them
  Array<Value> row_scratch_;
  Array<float> grad_probs_;                    // [num_experts] of the balancing loss, weighted
  Array<typename Rank::Math::Sum> prob_sums_;  // [num_experts] over the tokens

  // The same on the host.
  std::vector<double> balance_grads_;  // [num_experts] of the balancing loss
  std::vector<float> host_grad_probs_;
  std::vector<typename Rank::Math::Sum> host_prob_sums_;
  std::vector<int32_t> host_topk_idx_;
};

}  // namespace weft::moe
