// SPDX-License-Identifier: Apache-2.0
#include "train/replicas.hpp"

#include <algorithm>
#include <functional>

namespace weft::moe {

std::optional<Exchange> make_replica_exchange(const Group& group, const TrainConfig& config) {
  if (config.replicas == 0 || group.num_ranks() == 1) {
    return std::nullopt;
  }
  const ModelConfig& model = config.model;
  const int64_t num_own = model.num_experts / group.num_ranks();
  const ExchangeConfig wanted = {
      .hidden = model.hidden,
      .max_tokens = num_own * 3 * model.expert_hidden,
      .num_experts = group.num_ranks() * config.replicas,
      .max_topk = group.num_ranks() - 1,  // a rank has at most one replica of an expert
      .transport = config.transport,
      .num_threads = config.num_threads,
      .timeout = config.timeout};
  return Exchange(group, wanted);
}

void Replicas::bring(
    Exchange* exchange, const ModelConfig& model, const Plan& balanced, const Weights& masters
) {
  exchange_ = exchange;
  hidden_ = model.hidden;
  inner_ = model.expert_hidden;
  masters_ = masters;
  const std::span<const int32_t> placement = balanced.placement();
  const size_t num_places = placement.size() / static_cast<size_t>(balanced.num_ranks());
  places_.assign(num_places, {});
  moves_.reset();
  if (std::ranges::all_of(placement, [](int32_t expert) { return expert < 0; })) {
    return;  // on all ranks
  }
  moves_ = plan_moves(balanced);
  pack_weights();
  const int64_t num_rows = moves_->num_rows();
  values_.resize(static_cast<size_t>(num_rows * hidden_));
  grads_.assign(values_.size(), 0.0F);
  exchange_->dispatch(
      *moves_,
      {.x = matrix(static_cast<const float*>(packed_.data()), moves_->num_tokens(), hidden_)},
      {.rows = matrix(values_.data(), num_rows, hidden_)}
  );
  const auto here = placement.subspan(static_cast<size_t>(balanced.rank()) * num_places);
  const int64_t size_in = 2 * inner_ * hidden_;
  int64_t begin = 0;
  for (size_t place = 0; place < num_places; ++place) {
    if (here[place] >= 0) {
      const float* value = values_.data() + begin;
      float* grad = grads_.data() + begin;
      places_[place] = {value, value + size_in, grad, grad + size_in};
      begin += 3 * inner_ * hidden_;
    }
  }
}

// Every row of weights of an expert goes to all its replicas, by ascending rank.
Plan Replicas::plan_moves(const Plan& balanced) {
  const std::span<const int32_t> placement = balanced.placement();
  const auto most = static_cast<size_t>(balanced.num_ranks() - 1);
  const int64_t num_own = balanced.num_local_experts() - static_cast<int64_t>(places_.size());
  std::vector<int32_t> topk_idx;
  copied_.clear();
  for (int64_t own = 0; own < num_own; ++own) {
    std::vector<int32_t> targets;
    for (size_t place = 0; place < placement.size(); ++place) {
      if (placement[place] == balanced.rank() * num_own + own) {
        targets.push_back(static_cast<int32_t>(place));
      }
    }
    if (targets.empty()) {
      continue;
    }
    copied_.push_back(own);
    targets.resize(most, -1);
    for (int64_t row = 0; row < 3 * inner_; ++row) {
      topk_idx.insert(topk_idx.end(), targets.begin(), targets.end());
    }
  }
  const auto num_rows = static_cast<int64_t>(copied_.size()) * 3 * inner_;
  const int32_t* idx = topk_idx.data();
  return exchange_->plan(
      {.topk_idx = matrix(idx, num_rows, static_cast<int64_t>(most))},
      {.layout = Layout::kExpertMajor, .order = SumOrder::kTopk}
  );
}

void Replicas::pack_weights() {
  const int64_t size_out = inner_ * hidden_;
  packed_.resize(copied_.size() * static_cast<size_t>(3 * size_out));
  float* to = packed_.data();
  for (const int64_t own : copied_) {
    to = std::copy_n(masters_.in + own * 2 * size_out, 2 * size_out, to);
    to = std::copy_n(masters_.out + own * size_out, size_out, to);
  }
}

void Replicas::return_gradients() {
  if (!moves_) {
    return;
  }
  exchange_->combine(
      *moves_,
      {.rows = matrix(static_cast<const float*>(grads_.data()), moves_->num_rows(), hidden_)},
      {.x = matrix(packed_.data(), moves_->num_tokens(), hidden_)}
  );
}

void Replicas::add_to_masters() {
  if (!moves_) {
    return;
  }
  const int64_t size_out = inner_ * hidden_;
  const float* from = packed_.data();
  const auto add_to = [&](float* grad, int64_t size) {
    std::transform(grad, grad + size, from, grad, std::plus<>());
    from += size;
  };
  for (const int64_t own : copied_) {
    add_to(masters_.grad_in + own * 2 * size_out, 2 * size_out);
    add_to(masters_.grad_out + own * size_out, size_out);
  }
}

}  // namespace weft::moe
