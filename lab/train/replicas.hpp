// SPDX-License-Identifier: Apache-2.0
// What the replicas of a balanced plan compute with: the weights of experts of other ranks, which
// come before the experts run, and gradients, which go back to the masters after backward.
//
// An exchange of its own carries both. Its "experts" are the places for replicas of all ranks, and
// the rows of weights of an expert are its tokens: dispatch brings them to every replica, combine
// adds up the gradients of all of them.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "train/config.hpp"
#include "train/layers/experts.hpp"
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
  using Weights = Experts<HostMath>::Weights;

  // Collective on `exchange`, which may be null if there is one rank. Brings the weights that
  // `balanced` places here and clears their gradients; `masters` are all of this rank's experts.
  void bring(
      Exchange* exchange, const ModelConfig& model, const Plan& balanced, const Weights& masters
  );
  // Collective. Brings the sums of the gradients of all replicas, in fp32 in the order of their
  // ranks, to the ranks of the masters.
  void return_gradients();
  // Not collective: adds those to the gradients of the masters. Whoever else adds to these does so
  // on the same lane.
  void add_to_masters();

  // [replicas] of each place; null where it is empty.
  [[nodiscard]] std::span<const Weights> places() const { return places_; }

 private:
  [[nodiscard]] Plan plan_moves(const Plan& balanced);
  void pack_weights();

  Exchange* exchange_ = nullptr;
  int64_t hidden_ = 0;
  int64_t inner_ = 0;
  Weights masters_;
  std::vector<int64_t> copied_;  // of this rank's experts, those with replicas
  std::optional<Plan> moves_;    // none if there are no replicas
  std::vector<float> packed_;    // [copied, 3 * inner, hidden] an expert's in, then its out
  std::vector<float> values_;    // the same of the places that are not empty
  std::vector<float> grads_;
  std::vector<Weights> places_;
};

}  // namespace weft::moe
