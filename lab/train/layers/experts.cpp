// SPDX-License-Identifier: Apache-2.0
#include "train/layers/experts.hpp"

#include <cmath>

namespace weft::moe {
namespace {

float sigmoid(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

}  // namespace

void swiglu_forward(const HostLinear&, const SwigluRows<float>& rows, float* active) {
  const int64_t inner = rows.inner;
  for (int64_t row = 0; row < rows.rows; ++row) {
    const float* gate = rows.gate_up + row * 2 * inner;
    for (int64_t f = 0; f < inner; ++f) {
      *active++ = gate[f] * sigmoid(gate[f]) * gate[inner + f] * rows.weight[row];
    }
  }
}

void swiglu_backward(
    const HostLinear&,
    const SwigluRows<float>& rows,
    const float* grad_active,
    float* grad_gate_up,
    float* grad_weight
) {
  const int64_t inner = rows.inner;
  for (int64_t row = 0; row < rows.rows; ++row) {
    const float* gates = rows.gate_up + row * 2 * inner;
    const float* ups = gates + inner;
    float* grad_gates = grad_gate_up + row * 2 * inner;
    float* grad_ups = grad_gates + inner;
    float sum = 0.0F;
    for (int64_t f = 0; f < inner; ++f) {
      const float s = sigmoid(gates[f]);
      const float silu = gates[f] * s;
      const float grad_out = grad_active[row * inner + f];
      sum += grad_out * silu * ups[f];
      const float grad = grad_out * rows.weight[row];
      grad_ups[f] = grad * silu;
      grad_gates[f] = grad * ups[f] * (s + silu * (1.0F - s));
    }
    grad_weight[row] = sum;
  }
}

}  // namespace weft::moe
