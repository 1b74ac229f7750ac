// SPDX-License-Identifier: Apache-2.0
// This rank's experts of one block, each y = W_out * (silu(gate) * up) * row weight with [gate, up]
// = W_in * x. Rows lie expert after expert, as a plan of Layout::kExpertMajor leaves them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "train/layers/matrix.hpp"

namespace weft::moe {

struct ExpertRows {
  ConstRows x;                    // [num_rows, hidden]
  std::span<const float> weight;  // [num_rows] of each row's route
  std::span<const int64_t> rows_per_expert;
};

class Experts {
 public:
  // in: [num_local_experts, 2 * inner, hidden]; out: [num_local_experts, hidden, inner].
  Experts(Parameter in, Parameter out, int hidden, int inner)
      : in_(in), out_(out), hidden_(hidden), inner_(inner) {}

  void forward(const ExpertRows& rows, Matrix& y);
  // Rows as in forward. grad_x [num_rows, hidden]; grad_weight [num_rows].
  void backward(
      const ExpertRows& rows, ConstRows grad_y, Matrix& grad_x, std::vector<float>& grad_weight
  );
  // The rest of the backward, any time after it: adds to the parameters' gradients. Rows and grad_y
  // as they were.
  void add_weight_gradients(const ExpertRows& rows, ConstRows grad_y);

 private:
  [[nodiscard]] std::span<float> expert_in(std::span<float> all, size_t expert) const;
  [[nodiscard]] std::span<float> expert_out(std::span<float> all, size_t expert) const;

  Parameter in_;
  Parameter out_;
  int64_t hidden_;
  int64_t inner_;
  Matrix gate_up_;  // [num_rows, 2 * inner] kept for backward
  Matrix active_;   // [num_rows, inner] silu(gate) * up * weight, kept for backward
  Matrix grad_gate_up_;
  Matrix grad_active_;
};

}  // namespace weft::moe
