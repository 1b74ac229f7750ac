// SPDX-License-Identifier: Apache-2.0
// Operations on memory that a model computes between its exchanges, in fp32. Matrices lie row after
// row. The layers (block.hpp, ../step_model.hpp) call them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "train/layers/parameters.hpp"

namespace weft::moe {

// A product with w [out, in]; the number of rows differs by call.
struct ProductShape {
  int64_t rows = 0;
  int64_t in = 0;
  int64_t out = 0;
};

struct EmbeddingShape {
  int64_t num_tokens = 0;
  int64_t window = 0;
  int64_t hidden = 0;
  const uint8_t* windows = nullptr;  // [num_tokens, window]
};

struct NormShape {
  int64_t num_tokens = 0;
  int64_t hidden = 0;
  const float* x = nullptr;      // [num_tokens, hidden]
  const float* gain = nullptr;   // [hidden]
  float* inverse_rms = nullptr;  // [num_tokens] made by forward, used by backward
};
inline constexpr float kNormEpsilon = 1e-6F;

struct RouterShape {
  int64_t num_tokens = 0;
  int num_experts = 0;
  int topk = 0;
  float* probs = nullptr;       // [num_tokens, num_experts]
  int32_t* topk_idx = nullptr;  // [num_tokens, topk]
  float* weights = nullptr;     // [num_tokens, topk]
};

// Rows that the activation of experts works on.
struct SwigluRows {
  int64_t rows = 0;
  int64_t inner = 0;
  const float* gate_up = nullptr;  // [rows, 2 * inner] = [gate, up]
  const float* weight = nullptr;   // [rows]
};

struct LossShape {
  int64_t num_tokens = 0;
  int64_t num_classes = 0;
  const float* logits = nullptr;     // [num_tokens, num_classes]
  const uint8_t* targets = nullptr;  // [num_tokens]
  float scale = 1;                   // of the gradient
};

class Math {
 public:
  // --- products: the only place on the host that multiplies matrices ---
  // y [rows, out] = x [rows, in] * w^T.
  void forward(const ProductShape& s, const float* x, const float* w, float* y);
  // grad_x [rows, in] = grad_y [rows, out] * w.
  void backward_input(const ProductShape& s, const float* grad_y, const float* w, float* grad_x);
  // grad_x += grad_y * w.
  void add_backward_input(
      const ProductShape& s, const float* grad_y, const float* w, float* grad_x
  );
  // grad_w [out, in] += grad_y^T * x.
  void add_backward_weight(
      const ProductShape& s, const float* grad_y, const float* x, float* grad_w
  );

  // --- embedding: a token is the sum over its window of a vector for each (position, byte) pair,
  // the product with a wide one-hot row without the zeros; table [window, kNumBytes, hidden] ---
  // x [num_tokens, hidden].
  void embed(const EmbeddingShape& s, const float* table, float* x);
  void embed_backward(
      const EmbeddingShape& s, const float* grad_x, const Weight& table, const Shards& shards
  );

  // --- norm: y = x / sqrt(mean(x^2) + epsilon) * gain, row by row ---
  void norm(const NormShape& s, float* y);
  // grad_x += the gradient for x; adds to the gain's gradient.
  void norm_backward(
      const NormShape& s,
      const float* grad_y,
      float* grad_x,
      const Weight& gain,
      const Shards& shards
  );

  // --- router: softmax over all experts, the `topk` most probable win, a tie goes to the lower
  // index. With topk > 1 the weights are the winners' probabilities divided by their sum; with topk
  // = 1 the weight is the probability itself, so that the router still learns ---
  // Turns logits in `probs` into probabilities and chooses.
  void choose_experts(const RouterShape& s);
  // grad_weights [num_tokens, topk]; grad_probs [num_experts] is the gradient that the balancing
  // loss adds to every token's probabilities; grad_logits [num_tokens, num_experts].
  void router_backward(
      const RouterShape& s, const float* grad_weights, const float* grad_probs, float* grad_logits
  );
  // sums [cols] of values [rows, cols] over the rows.
  void column_sums(const float* values, int64_t rows, int64_t cols, double* sums);

  // --- activation of an expert ---
  // active [rows, inner] = silu(gate) * up * weight.
  void swiglu(const SwigluRows& s, float* active);
  // Gradients for gate_up [rows, 2 * inner] and weight [rows], from that for active.
  void swiglu_backward(
      const SwigluRows& s, const float* grad_active, float* grad_gate_up, float* grad_weight
  );

  // --- loss: cross-entropy of the next byte ---
  // losses [num_tokens] in nats, not scaled; grad_logits [num_tokens, num_classes], scaled.
  void cross_entropy(const LossShape& s, double* losses, float* grad_logits);

  // to += from.
  static void add(const float* from, float* to, int64_t size) {
    std::transform(from, from + size, to, to, std::plus<>());
  }

 private:
  std::vector<float> product_;  // of add_backward_input()
};

// Throws Error (kNotAvailable) if the library of products could not be loaded.
void check_blas();

// The load-balancing loss of one block over the global batch: E * sum_e f_e * P_e, where f_e is the
// part of all routes that expert e gets (global_routes: of all ranks) and P_e its mean probability.
// 1 when even. f_e comes from the plan, which knows every rank's counts. P_e is linear in the
// tokens, so this gives the gradient for the probability of each expert, the same for every token.
[[nodiscard]] std::vector<double> balance_gradients(
    std::span<const int64_t> global_routes, int64_t global_tokens
);
// This rank's part of the loss, from the sums of its tokens' probabilities; the sum over the ranks
// is the loss, however many they are.
template <class Sum>
[[nodiscard]] double balance_share(std::span<const double> grads, std::span<const Sum> prob_sums) {
  double share = 0;
  for (size_t e = 0; e < grads.size(); ++e) {
    share += grads[e] * static_cast<double>(prob_sums[e]);
  }
  return share;
}

}  // namespace weft::moe
