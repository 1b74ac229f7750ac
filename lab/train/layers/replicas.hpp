// SPDX-License-Identifier: Apache-2.0
// What replicas of popular experts need (docs/balance.md): their weights come from the experts'
// ranks before a block computes, and sums of gradients go from place to place of an expert, which
// adds its own, to the expert's rank. Experts multiply blocks of rows then, of which replicas have
// whole ones: so the losses have the bits of those without replicas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "train/config.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"
#include "weft/plan.hpp"

namespace weft::moe {

inline constexpr int64_t kBlockRows = 128;  // of a product

// Of one rank; all its blocks use it, one after the other.
class ReplicaCarrier {
 public:
  // Collective.
  ReplicaCarrier(const Group& group, const TrainConfig& config);

  // An expert's tensors, one after the other, of this rank's own experts: [size] each.
  struct Parts {
    const float* in = nullptr;
    const float* out = nullptr;
  };
  // Collective. The weights of this plan's replicas: `replicas` [num, size of an expert], on their
  // ranks.
  void push(const Plan& plan, const Parts& own, std::vector<float>& replicas);

  // Adds the gradients of a place of this rank, its own experts first, onto what is there.
  using Add = std::function<void(size_t place, float* grad_in, float* grad_out)>;
  // Collective. What the places of each expert of this rank add, its replicas by ascending rank,
  // then itself, each onto the sum of those before it; the whole onto grad_in and grad_out.
  void reduce(const Plan& plan, const Add& add, float* grad_in, float* grad_out);

 private:
  [[nodiscard]] size_t size() const { return size_in_ + size_out_; }  // of an expert
  [[nodiscard]] std::vector<float> carry(
      std::span<const float> experts, std::span<const int32_t> to
  );
  [[nodiscard]] std::map<int, std::vector<float>> sums_of_replicas(
      const Plan& plan, const Add& add
  );

  int rank_;
  int num_ranks_;
  size_t size_in_;  // elements of an expert's tensors
  size_t size_out_;
  int64_t rows_of_expert_;
  std::optional<Exchange> exchange_;  // none without replicas
  std::vector<float> sent_;           // rows on their way
};

}  // namespace weft::moe
