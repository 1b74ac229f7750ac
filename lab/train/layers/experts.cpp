// SPDX-License-Identifier: Apache-2.0
#include "train/layers/experts.hpp"

#include <cmath>

#include "train/layers/linear.hpp"

namespace weft::moe {
namespace {

float sigmoid(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

// active [inner] = silu(gate) * up * weight, with gate_up = [gate, up].
void activate(const float* gate_up, float weight, int64_t inner, float* active) {
  const float* up = gate_up + inner;
  for (int64_t f = 0; f < inner; ++f) {
    active[f] = gate_up[f] * sigmoid(gate_up[f]) * up[f] * weight;
  }
}

// Returns the gradient for the weight.
float activate_backward(
    const float* gate_up, float weight, int64_t inner, const float* grad_active, float* grad_gate_up
) {
  const float* up = gate_up + inner;
  float* grad_up = grad_gate_up + inner;
  float grad_weight = 0.0F;
  for (int64_t f = 0; f < inner; ++f) {
    const float gate = gate_up[f];
    const float s = sigmoid(gate);
    const float silu = gate * s;
    grad_weight += grad_active[f] * silu * up[f];
    const float grad = grad_active[f] * weight;
    grad_up[f] = grad * silu;
    grad_gate_up[f] = grad * up[f] * (s + silu * (1.0F - s));
  }
  return grad_weight;
}

}  // namespace

std::span<float> Experts::expert_in(std::span<float> all, size_t expert) const {
  const auto size = static_cast<size_t>(2 * inner_ * hidden_);
  return all.subspan(expert * size, size);
}

std::span<float> Experts::expert_out(std::span<float> all, size_t expert) const {
  const auto size = static_cast<size_t>(inner_ * hidden_);
  return all.subspan(expert * size, size);
}

void Experts::forward(const ExpertRows& rows, Matrix& y) {
  const int64_t num_rows = rows.x.rows;
  gate_up_.resize(num_rows, 2 * inner_);
  active_.resize(num_rows, inner_);
  y.resize(num_rows, hidden_);
  int64_t begin = 0;
  for (size_t e = 0; e < rows.rows_per_expert.size(); ++e) {
    const int64_t count = rows.rows_per_expert[e];
    const Rows gate_up = slice(rows_of(gate_up_), begin, count);
    linear_forward(slice(rows.x, begin, count), expert_in(in_.value, e).data(), gate_up);
    for (int64_t i = begin; i < begin + count; ++i) {
      activate(gate_up_.row(i), rows.weight[static_cast<size_t>(i)], inner_, active_.row(i));
    }
    linear_forward(
        slice(active_, begin, count),
        expert_out(out_.value, e).data(),
        slice(rows_of(y), begin, count)
    );
    begin += count;
  }
}

void Experts::backward(
    const ExpertRows& rows, ConstRows grad_y, Matrix& grad_x, std::vector<float>& grad_weight
) {
  const int64_t num_rows = rows.x.rows;
  grad_active_.resize(num_rows, inner_);
  grad_gate_up_.resize(num_rows, 2 * inner_);
  grad_x.resize(num_rows, hidden_);
  grad_weight.resize(static_cast<size_t>(num_rows));
  int64_t begin = 0;
  for (size_t e = 0; e < rows.rows_per_expert.size(); ++e) {
    const int64_t count = rows.rows_per_expert[e];
    const ConstRows gy = slice(grad_y, begin, count);
    const Rows grad_gate_up = slice(rows_of(grad_gate_up_), begin, count);
    linear_backward_input(
        gy, expert_out(out_.value, e).data(), slice(rows_of(grad_active_), begin, count)
    );
    for (int64_t i = begin; i < begin + count; ++i) {
      const auto row = static_cast<size_t>(i);
      grad_weight[row] = activate_backward(
          gate_up_.row(i), rows.weight[row], inner_, grad_active_.row(i), grad_gate_up_.row(i)
      );
    }
    linear_backward_input(
        grad_gate_up, expert_in(in_.value, e).data(), slice(rows_of(grad_x), begin, count)
    );
    begin += count;
  }
}

void Experts::add_weight_gradients(const ExpertRows& rows, ConstRows grad_y) {
  int64_t begin = 0;
  for (size_t e = 0; e < rows.rows_per_expert.size(); ++e) {
    const int64_t count = rows.rows_per_expert[e];
    linear_backward_weight(
        slice(grad_y, begin, count), slice(active_, begin, count), expert_out(out_.grad, e).data()
    );
    linear_backward_weight(
        slice(rows_of(grad_gate_up_), begin, count),
        slice(rows.x, begin, count),
        expert_in(in_.grad, e).data()
    );
    begin += count;
  }
}

}  // namespace weft::moe
