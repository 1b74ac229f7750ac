// SPDX-License-Identifier: Apache-2.0
#include "train/layers/math.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace weft::moe {
namespace {

std::span<float> row_of(float* rows, int64_t row, int64_t cols) {
  return {rows + row * cols, static_cast<size_t>(cols)};
}

// Returns where the vector of a byte at a position begins in the table.
int64_t vector_at(const EmbeddingShape& s, int64_t position, uint8_t byte) {
  return (position * kNumBytes + byte) * s.hidden;
}

void softmax_in_place(std::span<float> row) {
  const float largest = *std::ranges::max_element(row);
  float sum = 0.0F;
  for (float& value : row) {
    value = std::exp(value - largest);
    sum += value;
  }
  for (float& value : row) {
    value /= sum;
  }
}

// Turns the gradient for the probabilities into the gradient for the logits.
void softmax_backward_in_place(const float* probs, std::span<float> grad) {
  float mean = 0.0F;
  for (size_t i = 0; i < grad.size(); ++i) {
    mean += probs[i] * grad[i];
  }
  for (size_t i = 0; i < grad.size(); ++i) {
    grad[i] = probs[i] * (grad[i] - mean);
  }
}

float sigmoid(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

}  // namespace

void Math::embed(const EmbeddingShape& s, const float* table, float* x) {
  std::fill_n(x, s.num_tokens * s.hidden, 0.0F);
  for (int64_t t = 0; t < s.num_tokens; ++t) {
    float* out = x + t * s.hidden;
    for (int64_t p = 0; p < s.window; ++p) {
      const float* vector = table + vector_at(s, p, s.windows[t * s.window + p]);
      for (int64_t h = 0; h < s.hidden; ++h) {
        out[h] += vector[h];
      }
    }
  }
}

void Math::embed_backward(
    const EmbeddingShape& s, const float* grad_x, const Weight& table, const Shards& shards
) {
  for (size_t i = 0; i < shards.size(); ++i) {
    // Index of the (token, position) pair.
    for (int64_t w = shards[i].begin * s.window; w < shards[i].end * s.window; ++w) {
      const float* grad = grad_x + w / s.window * s.hidden;
      float* vector = table.grad_of(i) + vector_at(s, w % s.window, s.windows[w]);
      for (int64_t h = 0; h < s.hidden; ++h) {
        vector[h] += grad[h];
      }
    }
  }
}

void Math::norm(const NormShape& s, float* y) {
  for (int64_t t = 0; t < s.num_tokens; ++t) {
    const float* in = s.x + t * s.hidden;
    float* out = y + t * s.hidden;
    float sum = 0.0F;
    for (int64_t h = 0; h < s.hidden; ++h) {
      sum += in[h] * in[h];
    }
    const float scale = 1.0F / std::sqrt(sum / static_cast<float>(s.hidden) + kNormEpsilon);
    s.inverse_rms[t] = scale;
    for (int64_t h = 0; h < s.hidden; ++h) {
      out[h] = in[h] * scale * s.gain[h];
    }
  }
}

void Math::norm_backward(
    const NormShape& s, const float* grad_y, float* grad_x, const Weight& gain, const Shards& shards
) {
  for (size_t i = 0; i < shards.size(); ++i) {
    float* grad_gain = gain.grad_of(i);
    for (int64_t t = shards[i].begin; t < shards[i].end; ++t) {
      const float* in = s.x + t * s.hidden;
      const float* gy = grad_y + t * s.hidden;
      float* gx = grad_x + t * s.hidden;
      const float scale = s.inverse_rms[t];
      float dot = 0.0F;
      for (int64_t h = 0; h < s.hidden; ++h) {
        dot += gy[h] * s.gain[h] * in[h];
        grad_gain[h] += gy[h] * in[h] * scale;
      }
      // The scale depends on every element of the row.
      const float pull = dot * scale * scale / static_cast<float>(s.hidden);
      for (int64_t h = 0; h < s.hidden; ++h) {
        gx[h] += scale * (gy[h] * s.gain[h] - in[h] * pull);
      }
    }
  }
}

void Math::choose_experts(const RouterShape& s) {
  for (int64_t t = 0; t < s.num_tokens; ++t) {
    const std::span<float> probs = row_of(s.probs, t, s.num_experts);
    softmax_in_place(probs);
    int32_t* chosen = s.topk_idx + t * s.topk;
    const std::span<float> weights = row_of(s.weights, t, s.topk);
    for (int k = 0; k < s.topk; ++k) {
      int32_t best = -1;
      for (int32_t e = 0; e < s.num_experts; ++e) {
        const bool is_taken = std::find(chosen, chosen + k, e) != chosen + k;
        const auto prob_of = [&](int32_t expert) { return probs[static_cast<size_t>(expert)]; };
        if (!is_taken && (best < 0 || prob_of(e) > prob_of(best))) {
          best = e;
        }
      }
      chosen[k] = best;
      weights[static_cast<size_t>(k)] = probs[static_cast<size_t>(best)];
    }
    if (s.topk > 1) {
      const float sum = std::accumulate(weights.begin(), weights.end(), 0.0F);
      std::ranges::for_each(weights, [sum](float& weight) { weight /= sum; });
    }
  }
}

void Math::router_backward(
    const RouterShape& s, const float* grad_weights, const float* grad_probs, float* grad_logits
) {
  for (int64_t t = 0; t < s.num_tokens; ++t) {
    const float* gw = grad_weights + t * s.topk;
    const float* weights = s.weights + t * s.topk;
    const float* probs = s.probs + t * s.num_experts;
    const int32_t* chosen = s.topk_idx + t * s.topk;
    const std::span<float> grad = row_of(grad_logits, t, s.num_experts);
    std::copy_n(grad_probs, s.num_experts, grad.data());
    float sum = 0.0F;
    float mean = 0.0F;  // of the weights' gradients: what the division by the sum takes away
    for (int k = 0; k < s.topk; ++k) {
      sum += probs[chosen[k]];
      mean += gw[k] * weights[k];
    }
    for (int k = 0; k < s.topk; ++k) {
      grad[static_cast<size_t>(chosen[k])] += s.topk > 1 ? (gw[k] - mean) / sum : gw[k];
    }
    softmax_backward_in_place(probs, grad);
  }
}

void Math::column_sums(const float* values, int64_t rows, int64_t cols, double* sums) {
  std::fill_n(sums, cols, 0.0);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      sums[col] += static_cast<double>(values[row * cols + col]);
    }
  }
}

void Math::swiglu(const SwigluRows& s, float* active) {
  for (int64_t row = 0; row < s.rows; ++row) {
    const float* gate = s.gate_up + row * 2 * s.inner;
    for (int64_t f = 0; f < s.inner; ++f) {
      *active++ = gate[f] * sigmoid(gate[f]) * gate[s.inner + f] * s.weight[row];
    }
  }
}

void Math::swiglu_backward(
    const SwigluRows& s, const float* grad_active, float* grad_gate_up, float* grad_weight
) {
  const int64_t inner = s.inner;
  for (int64_t row = 0; row < s.rows; ++row) {
    const float* gates = s.gate_up + row * 2 * inner;
    const float* ups = gates + inner;
    float* grad_gates = grad_gate_up + row * 2 * inner;
    float* grad_ups = grad_gates + inner;
    float sum = 0.0F;
    for (int64_t f = 0; f < inner; ++f) {
      const float sig = sigmoid(gates[f]);
      const float silu = gates[f] * sig;
      const float grad_out = grad_active[row * inner + f];
      sum += grad_out * silu * ups[f];
      const float grad = grad_out * s.weight[row];
      grad_ups[f] = grad * silu;
      grad_gates[f] = grad * ups[f] * (sig + silu * (1.0F - sig));
    }
    grad_weight[row] = sum;
  }
}

void Math::cross_entropy(const LossShape& s, double* losses, float* grad_logits) {
  std::copy_n(s.logits, s.num_tokens * s.num_classes, grad_logits);
  for (int64_t t = 0; t < s.num_tokens; ++t) {
    const std::span<float> row = row_of(grad_logits, t, s.num_classes);
    const size_t target = s.targets[t];
    float& largest = *std::ranges::max_element(row);
    const float margin = largest - row[target];
    softmax_in_place(row);
    // The loss comes from the largest probability, whose logarithm is always finite.
    losses[t] = static_cast<double>(margin) - std::log(static_cast<double>(largest));
    row[target] -= 1.0F;
    std::ranges::for_each(row, [&](float& value) { value *= s.scale; });
  }
}

std::vector<double> balance_gradients(
    std::span<const int64_t> global_routes, int64_t global_tokens
) {
  const auto all = std::accumulate(global_routes.begin(), global_routes.end(), int64_t{0});
  const auto num_experts = static_cast<double>(global_routes.size());
  std::vector<double> grads;
  for (const int64_t routes : global_routes) {
    const double part = static_cast<double>(routes) / static_cast<double>(all);
    grads.push_back(num_experts * part / static_cast<double>(global_tokens));
  }
  return grads;
}

}  // namespace weft::moe
