// SPDX-License-Identifier: Apache-2.0
// This rank's experts of one block, each y = W_out * (silu(gate) * up) * row weight with [gate, up]
// = W_in * x. Rows lie expert after expert, as a plan of Layout::kExpertMajor leaves them, those of
// replicas last. The blocks (block.hpp) give them the rows that a dispatch brought.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>

#include "train/layers/math.hpp"

namespace weft::moe {

// Math: HostMath, or DeviceMath, on whose stream all work is then queued; it says what type rows
// and weights have. Sums, gradients of weights and row weights are fp32.
template <class Math>
class Experts {
 public:
  using Value = typename Math::Value;

  struct Weights {
    const Value* in = nullptr;   // [num_local_experts, 2 * inner, hidden]
    const Value* out = nullptr;  // [num_local_experts, hidden, inner]
    float* grad_in = nullptr;
    float* grad_out = nullptr;
  };
  // Of other ranks' experts, behind this rank's own: [num, 3 * inner * hidden], each first W_in,
  // then W_out. Their gradients are the caller's.
  struct Replicas {
    const Value* weights = nullptr;
    int num = 0;
  };
  struct Rows {
    const Value* x = nullptr;                  // [num_rows, hidden]
    const float* weight = nullptr;             // [num_rows] of each row's route
    std::span<const int64_t> rows_per_expert;  // in host memory; padding included
  };

  // block_rows: most rows of a product; 0: all of an expert.
  Experts(Math& math, const Weights& weights, int hidden, int inner, int64_t block_rows = 0)
      : math_(&math), weights_(weights), hidden_(hidden), inner_(inner), block_rows_(block_rows) {}

  // For the next forward and its backward.
  void set_replicas(const Replicas& replicas) { replicas_ = replicas; }

  // y [num_rows, hidden].
  void forward(const Rows& rows, Value* y) {
    const int64_t num_rows = resize(rows, gate_up_, active_);
    for_each_product(rows, [&](const Product& at) {
      math_->forward(at.into, rows.x + at.x, at.in, gate_up_.data() + at.gate_up);
    });
    const SwigluRows<Value> gated = {num_rows, inner_, gate_up_.data(), rows.weight};
    math_->swiglu(gated, active_.data());
    for_each_product(rows, [&](const Product& at) {
      math_->forward(at.out_of, active_.data() + at.active, at.out, y + at.x);
    });
  }

  // Rows as in forward; grad_y, grad_x [num_rows, hidden]; grad_weight [num_rows].
  void backward(const Rows& rows, const Value* grad_y, Value* grad_x, float* grad_weight) {
    const int64_t num_rows = resize(rows, grad_gate_up_, grad_active_);
    for_each_product(rows, [&](const Product& at) {
      math_->backward_input(at.out_of, grad_y + at.x, at.out, grad_active_.data() + at.active);
    });
    const SwigluRows<Value> gated = {num_rows, inner_, gate_up_.data(), rows.weight};
    math_->swiglu_backward(gated, grad_active_.data(), grad_gate_up_.data(), grad_weight);
    for_each_product(rows, [&](const Product& at) {
      math_->backward_input(at.into, grad_gate_up_.data() + at.gate_up, at.in, grad_x + at.x);
    });
  }

  // The rest of the backward, any time after it: adds to the weights' gradients, of this rank's own
  // experts. Rows and grad_y as they were.
  void add_weight_gradients(const Rows& rows, const Value* grad_y) {
    for (size_t e = 0; e < num_own(rows); ++e) {
      const auto expert = static_cast<int64_t>(e);
      float* grad_in = weights_.grad_in + expert * size_in();
      add_weight_gradients(rows, grad_y, e, grad_in, weights_.grad_out + expert * size_out());
    }
  }
  // The same of one place, its own or a replica's, to any gradients; product after product.
  void add_weight_gradients(
      const Rows& rows, const Value* grad_y, size_t place, float* grad_in, float* grad_out
  ) const {
    const auto counts = rows.rows_per_expert.first(place);
    const int64_t first = std::reduce(counts.begin(), counts.end());
    for_each_product_of(rows, place, first, [&](const Product& at) {
      math_->add_backward_weight(at.out_of, grad_y + at.x, active_.data() + at.active, grad_out);
      math_->add_backward_weight(
          at.into, grad_gate_up_.data() + at.gate_up, rows.x + at.x, grad_in
      );
    });
  }

  [[nodiscard]] const Weights& weights() const { return weights_; }
  [[nodiscard]] int64_t size_in() const { return 2 * inner_ * hidden_; }  // elements of an expert
  [[nodiscard]] int64_t size_out() const { return hidden_ * inner_; }

 private:
  using Array = typename Math::template Array<Value>;

  // Where a part of an expert's rows begins, in elements, its weights, and the shapes of its two
  // products.
  struct Product {
    ProductShape into;
    ProductShape out_of;
    const Value* in = nullptr;
    const Value* out = nullptr;
    int64_t x = 0;
    int64_t gate_up = 0;
    int64_t active = 0;
  };
  template <class Visit>
  void for_each_product(const Rows& rows, const Visit& visit) const {
    int64_t first = 0;
    for (size_t place = 0; place < rows.rows_per_expert.size(); ++place) {
      for_each_product_of(rows, place, first, visit);
      first += rows.rows_per_expert[place];
    }
  }
  template <class Visit>
  void for_each_product_of(const Rows& rows, size_t place, int64_t first, const Visit& visit)
      const {
    const auto at = static_cast<int64_t>(place);
    const int64_t replica = at - static_cast<int64_t>(num_own(rows));
    const Value* weights =
        replicas_.weights + std::max<int64_t>(replica, 0) * (size_in() + size_out());
    Product product = {.into = {0, hidden_, 2 * inner_}, .out_of = {0, inner_, hidden_}};
    product.in = replica < 0 ? weights_.in + at * size_in() : weights;
    product.out = replica < 0 ? weights_.out + at * size_out() : weights + size_in();
    const int64_t end = first + rows.rows_per_expert[place];
    const int64_t step = block_rows_ > 0 ? block_rows_ : std::max<int64_t>(end - first, 1);
    for (int64_t row = first; row < end; row += step) {
      product.into.rows = product.out_of.rows = std::min(step, end - row);
      product.x = row * hidden_;
      product.gate_up = row * 2 * inner_;
      product.active = row * inner_;
      visit(product);
    }
  }
  [[nodiscard]] size_t num_own(const Rows& rows) const {
    return rows.rows_per_expert.size() - static_cast<size_t>(replicas_.num);
  }
  // Makes room for all rows and returns how many there are.
  [[nodiscard]] int64_t resize(const Rows& rows, Array& gate_up, Array& active) const {
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
  int64_t block_rows_;
  Replicas replicas_;
  Array gate_up_;  // [num_rows, 2 * inner] kept for backward
  Array active_;   // [num_rows, inner] silu(gate) * up * weight, kept for backward
  Array grad_gate_up_;
  Array grad_active_;
};

}  // namespace weft::moe
