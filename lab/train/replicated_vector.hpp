// SPDX-License-Identifier: Apache-2.0
// The parameters that every rank holds, kept equal by the exchange itself. Each rank owns a slice:
// only that rank sums the slice's gradients, updates it and hands it to the others.
//
// The vector is cut into rows, and a rank's own rows are the tokens of two kinds of plan, with one
// "expert" on each rank. Routed to all ranks, dispatch gathers everyone's slices into the whole
// vector. Routed to the ranks that hold a shard, combine brings the gradients of that shard back to
// the owner, who adds the shards in their order.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "train/config.hpp"
#include "train/layers/parameters.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"

namespace weft::moe {

class ReplicatedVector {
 public:
  // Collective. `size` elements, the same on every rank.
  ReplicatedVector(const Group& group, size_t size, const TrainConfig& config);

  // [size] the values, and the gradients of each of this rank's shards.
  [[nodiscard]] Parameter all();
  // The elements this rank owns: [own_begin, own_begin + own size) of the above. Its gradients are
  // the sums over all shards.
  [[nodiscard]] Parameter own();
  [[nodiscard]] size_t own_begin() const { return own_begin_; }

  void clear_grads();
  // Collective. own().grad = sum of all ranks' gradients, shard after shard.
  void reduce();
  // Collective. all().value = everyone's own().value.
  void broadcast();

 private:
  // The n-th shard of every rank that has as many.
  struct Round {
    Plan plan;
    std::vector<int> ranks;
    std::vector<float> arrived;  // [ranks, own_rows, kRowElements]
  };

  [[nodiscard]] Plan plan_of(const std::vector<int32_t>& topk_idx, int64_t topk);
  void add_round(const Round& round, size_t place);

  int num_ranks_;
  size_t size_;
  size_t own_begin_ = 0;
  size_t own_size_ = 0;
  int64_t own_rows_ = 0;
  Exchange exchange_;
  std::optional<Plan> to_all_;
  std::vector<Round> rounds_;
  Buffer values_;                  // [rows, kRowElements]
  size_t grad_stride_ = 0;         // rows * kRowElements
  std::vector<float> grads_;       // [shards of this rank, grad_stride]
  std::vector<float> own_values_;  // [own_rows, kRowElements]
  std::vector<float> own_grads_;
};

}  // namespace weft::moe
