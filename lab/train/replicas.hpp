// SPDX-License-Identifier: Apache-2.0
// Data of the replicas of a balanced plan: the weights of experts of other ranks, which come before
// the experts run, and gradients, which go back to the masters after backward.
//
// An exchange of its own carries both. Its "experts" are the places for replicas of all ranks, and
// the rows of weights of an expert are its tokens: dispatch brings them to every replica, as they
// are, combine adds up the gradients of all of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "train/config.hpp"
#include "train/layers/experts.hpp"
#include "train/rank.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"

namespace weft::moe {

// Collective. The exchange that carries weights and gradients; none if no rank has replicas.
[[nodiscard]] std::optional<Exchange> make_replica_exchange(
    const Group& group, const TrainConfig& config
);

// This rank's replicas of one block's experts for one micro-batch.
class Replicas {
 public:
  using Weights = Experts::Weights;

  // Collective, on the lane of exchanges. Brings the weights that `balanced` places here and clears
  // their gradients; `masters` are all of this rank's experts.
  void bring(Rank& rank, const Plan& balanced, const Weights& masters) {
    const ModelConfig& model = rank.config();
    hidden_ = model.hidden;
    size_out_ = int64_t{model.expert_hidden} * hidden_;
    masters_ = masters;
    const std::span<const int32_t> placement = balanced.placement();
    const size_t num_places = placement.size() / static_cast<size_t>(balanced.num_ranks());
    places_.assign(num_places, {});
    moves_.reset();
    if (std::ranges::all_of(placement, [](int32_t expert) { return expert < 0; })) {
      return;  // on all ranks
    }
    moves_ = plan_moves(rank, balanced);
    pack_weights();
    values_.resize(static_cast<size_t>(moves_->num_rows() * hidden_));
    grads_.resize(values_.size());
    std::ranges::fill(grads_, 0.0F);
    rank.send_weights(*moves_, packed_.data(), values_.data());
    const auto here = placement.subspan(static_cast<size_t>(balanced.rank()) * num_places);
    int64_t begin = 0;
    for (size_t place = 0; place < num_places; ++place) {
      if (here[place] >= 0) {
        const float* value = values_.data() + begin;
        float* grad = grads_.data() + begin;
        places_[place] = {value, value + 2 * size_out_, grad, grad + 2 * size_out_};
        begin += 3 * size_out_;
      }
    }
  }
  // Collective, on the lane of exchanges. Brings the sums of the gradients of all replicas, in fp32
  // in the order of their ranks, to the ranks of the masters.
  void return_gradients(Rank& rank) {
    if (moves_) {
      sums_.resize(packed_.size());
      rank.sum_gradients(*moves_, grads_.data(), sums_.data());
    }
  }
  // Adds those to the gradients of the masters, on the lane that computes: whoever else adds to
  // these does so there.
  void add_to_masters() {
    if (!moves_) {
      return;
    }
    const float* from = sums_.data();
    for (const int64_t own : copied_) {
      Math::add(from, masters_.grad_in + own * 2 * size_out_, 2 * size_out_);
      Math::add(from + 2 * size_out_, masters_.grad_out + own * size_out_, size_out_);
      from += 3 * size_out_;
    }
  }

  // [replicas] of each place; null where it is empty.
  [[nodiscard]] std::span<const Weights> places() const { return places_; }

 private:
  // Every row of weights of an expert goes to all its replicas, by ascending rank.
  [[nodiscard]] Plan plan_moves(Rank& rank, const Plan& balanced) {
    const std::span<const int32_t> placement = balanced.placement();
    const auto most = static_cast<size_t>(balanced.num_ranks() - 1);
    const int64_t num_own = balanced.num_local_experts() - balanced.num_replicas();
    const int64_t num_rows = 3 * size_out_ / hidden_;  // of an expert
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
      for (int64_t row = 0; row < num_rows; ++row) {
        topk_idx.insert(topk_idx.end(), targets.begin(), targets.end());
      }
    }
    return rank.plan_weights(static_cast<int64_t>(copied_.size()) * num_rows, topk_idx);
  }

  void pack_weights() {
    packed_.resize(copied_.size() * static_cast<size_t>(3 * size_out_));
    float* to = packed_.data();
    for (const int64_t own : copied_) {
      std::copy_n(masters_.in + own * 2 * size_out_, 2 * size_out_, to);
      std::copy_n(masters_.out + own * size_out_, size_out_, to + 2 * size_out_);
      to += 3 * size_out_;
    }
  }

  int64_t hidden_ = 0;
  int64_t size_out_ = 0;  // of an expert's second matrix, half of its first
  Weights masters_;
  std::vector<int64_t> copied_;  // of this rank's experts, those with replicas
  std::optional<Plan> moves_;    // none if there are no replicas
  std::vector<float> packed_;    // [copied, 3 * inner, hidden] an expert's in, then its out
  std::vector<float> sums_;      // the same of the gradients that replicas have
  std::vector<float> values_;    // the same of the places that are not empty
  std::vector<float> grads_;
  std::vector<Weights> places_;
};

}  // namespace weft::moe
