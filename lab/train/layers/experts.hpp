// SPDX-License-Identifier: Apache-2.0
// This rank's experts of one block, each y = W_out * (silu(gate) * up) * row weight with [gate, up]
// = W_in * x. Rows lie expert after expert, as a plan of Layout::kExpertMajor leaves them. The
// blocks (block.hpp) give them the rows that a dispatch brought.
#pragma once

#include <cstdint>
#include <numeric>
#include <span>

#include "train/layers/math.hpp"

namespace weft::moe {

class Experts {
 public:
  struct Weights {
    const float* in = nullptr;   // [num_local_experts, 2 * inner, hidden]
    const float* out = nullptr;  // [num_local_experts, hidden, inner]
    float* grad_in = nullptr;
    float* grad_out = nullptr;
  };
  struct Rows {
    const float* x = nullptr;                  // [num_rows, hidden]
    const float* weight = nullptr;             // [num_rows] of each row's route
    std::span<const int64_t> rows_per_expert;  // in host memory; padding included
    std::span<const Weights> replicas = {};    // of the last experts: one each, alone in its memory
  };

  Experts(Math& math, const Weights& weights, int hidden, int inner)
      : math_(&math), weights_(weights), hidden_(hidden), inner_(inner) {}

  [[nodiscard]] const Weights& weights() const { return weights_; }

  // y [num_rows, hidden].
  void forward(const Rows& rows, float* y) {
    const int64_t num_rows = resize(rows, gate_up_, active_);
    for_each_expert(rows, [&](const Place& at) {
      const float* in = at.weights.in;
      math_->forward(at.into, rows.x + at.x, in, gate_up_.data() + at.gate_up);
    });
    const SwigluRows gated = {num_rows, inner_, gate_up_.data(), rows.weight};
    math_->swiglu(gated, active_.data());
    for_each_expert(rows, [&](const Place& at) {
      const float* out = at.weights.out;
      math_->forward(at.out_of, active_.data() + at.active, out, y + at.x);
    });
  }

  // Rows as in forward; grad_y, grad_x [num_rows, hidden]; grad_weight [num_rows].
  void backward(const Rows& rows, const float* grad_y, float* grad_x, float* grad_weight) {
    const int64_t num_rows = resize(rows, grad_gate_up_, grad_active_);
    for_each_expert(rows, [&](const Place& at) {
      const float* out = at.weights.out;
      math_->backward_input(at.out_of, grad_y + at.x, out, grad_active_.data() + at.active);
    });
    const SwigluRows gated = {num_rows, inner_, gate_up_.data(), rows.weight};
    math_->swiglu_backward(gated, grad_active_.data(), grad_gate_up_.data(), grad_weight);
    for_each_expert(rows, [&](const Place& at) {
      const float* in = at.weights.in;
      math_->backward_input(at.into, grad_gate_up_.data() + at.gate_up, in, grad_x + at.x);
    });
  }

  // The rest of the backward, any time after it: adds to the gradients of this rank's own weights,
  // and of its replicas'. Rows and grad_y as they were.
  void add_weight_gradients(const Rows& rows, const float* grad_y) {
    add_gradients(rows, grad_y, false);
  }
  void add_replica_gradients(const Rows& rows, const float* grad_y) {
    add_gradients(rows, grad_y, true);
  }

 private:
  // Place where an expert's part begins, in elements, and the shapes of its two products.
  struct Place {
    ProductShape into;
    ProductShape out_of;
    int64_t x = 0;
    int64_t gate_up = 0;
    int64_t active = 0;
    Weights weights = {};
    bool is_replica = false;
  };
  void add_gradients(const Rows& rows, const float* grad_y, bool of_replicas) {
    for_each_expert(rows, [&](const Place& at) {
      if (at.is_replica != of_replicas) {
        return;
      }
      math_->add_backward_weight(
          at.out_of, grad_y + at.x, active_.data() + at.active, at.weights.grad_out
      );
      math_->add_backward_weight(
          at.into, grad_gate_up_.data() + at.gate_up, rows.x + at.x, at.weights.grad_in
      );
    });
  }
  template <class Visit>
  void for_each_expert(const Rows& rows, const Visit& visit) const {
    Place at = {.into = {0, hidden_, 2 * inner_}, .out_of = {0, inner_, hidden_}};
    const size_t num_own = rows.rows_per_expert.size() - rows.replicas.size();
    for (size_t idx = 0; idx < rows.rows_per_expert.size(); ++idx) {
      const int64_t count = rows.rows_per_expert[idx];
      if (count == 0) {
        continue;  // a place without a replica has no weights
      }
      at.into.rows = at.out_of.rows = count;
      at.is_replica = idx >= num_own;
      at.weights = at.is_replica ? rows.replicas[idx - num_own] : own_weights(idx);
      visit(at);
      at.x += count * hidden_;
      at.gate_up += count * 2 * inner_;
      at.active += count * inner_;
    }
  }
  [[nodiscard]] Weights own_weights(size_t idx) const {
    const int64_t out = static_cast<int64_t>(idx) * hidden_ * inner_;
    const int64_t in = 2 * out;
    return {weights_.in + in, weights_.out + out, weights_.grad_in + in, weights_.grad_out + out};
  }
  // Makes room for all rows and returns how many there are.
  [[nodiscard]] int64_t resize(
      const Rows& rows, std::vector<float>& gate_up, std::vector<float>& active
  ) const {
    const auto& counts = rows.rows_per_expert;
    const int64_t num_rows = std::reduce(counts.begin(), counts.end());
    gate_up.resize(static_cast<size_t>(num_rows * 2 * inner_));
    active.resize(static_cast<size_t>(num_rows * inner_));
    return num_rows;
  }

  Math* math_;
  Weights weights_;
  int64_t hidden_;
  int64_t inner_;
  std::vector<float> gate_up_;  // [num_rows, 2 * inner] kept for backward
  std::vector<float> active_;   // [num_rows, inner] silu(gate) * up * weight, kept for backward
  std::vector<float> grad_gate_up_;
  std::vector<float> grad_active_;
};

}  // namespace weft::moe
