// SPDX-License-Identifier: Apache-2.0
// The parameters that every rank holds, kept equal by the exchange itself. Each rank owns a slice:
// it alone sums the slice's gradients, updates it and hands it to the others.
//
// The vector is cut into rows; a rank's own rows are tokens that are routed to all ranks, one
// "expert" each. With that plan dispatch gathers everyone's slices into the whole vector, and
// combine adds the ranks' gradients, by rank, at the owner: the two halves of an all-reduce.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "moe/config.hpp"
#include "moe/matrix.hpp"
#include "moe/traffic.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"

namespace weft::moe {

class ReplicatedVector {
 public:
  // Collective. `size` elements, the same on every rank.
  ReplicatedVector(const Group& group, size_t size, const TrainConfig& config);

  // [size] the values, and this rank's contribution to their gradients.
  [[nodiscard]] Parameter all();
  // The elements this rank owns: [own_begin, own_begin + own size) of the above. Its gradients are
  // the sums over the ranks.
  [[nodiscard]] Parameter own();
  [[nodiscard]] size_t own_begin() const { return own_begin_; }

  // Collective. own().grad = sum of the ranks' all().grad.
  void reduce();
  // Collective. all().value = everyone's own().value.
  void broadcast();

  [[nodiscard]] const Traffic& traffic() const { return traffic_; }
  void reset_traffic() { traffic_ = {}; }

 private:
  size_t size_;
  size_t own_begin_ = 0;
  size_t own_size_ = 0;
  int64_t own_rows_ = 0;
  Exchange exchange_;
  std::optional<Plan> plan_;
  Buffer values_;             // [num_rows, kRowElements]
  std::vector<float> grads_;  // the same
  Matrix own_values_;         // [own_rows, kRowElements]
  Matrix own_grads_;
  Traffic traffic_;
};

}  // namespace weft::moe
