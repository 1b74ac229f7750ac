// SPDX-License-Identifier: Apache-2.0
// The model's arithmetic on a GPU, products aside: each does what the host's class of the same name
// does. All pointers are device memory, matrices lie row after row, bf16 is uint16_t. Each queues
// its kernels on the stream and returns; the same input gives the same bits. Throws Error (kCuda).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "train/layers/adamw.hpp"
#include "train/layers/experts.hpp"

namespace weft::moe {

// --- element by element ---
void to_bf16_cuda(const float* from, uint16_t* to, int64_t size, cudaStream_t stream);
void to_float_cuda(const uint16_t* from, float* to, int64_t size, cudaStream_t stream);
// to += from.
void add_cuda(const uint16_t* from, float* to, int64_t size, cudaStream_t stream);

inline constexpr int64_t kSumParts = 64;
// sums [cols] of values [rows, cols] over the rows; scratch [kSumParts, cols].
struct ColumnSums {
  const float* values = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  float* scratch = nullptr;
  float* sums = nullptr;
  bool adds = false;  // to what is in `sums`
};
void column_sums_cuda(const ColumnSums& call, cudaStream_t stream);

// --- embedding ---
struct EmbeddingShape {
  int64_t num_tokens = 0;
  int64_t window = 0;
  int64_t hidden = 0;
  const uint8_t* windows = nullptr;  // [num_tokens, window]
  bool adds = false;                 // backward adds to the table's gradient
};
// x [num_tokens, hidden]; table [window, kNumBytes, hidden].
void embedding_forward_cuda(
    const EmbeddingShape& shape, const float* table, float* x, cudaStream_t stream
);
// Overwrites grad_table, or adds to it.
void embedding_backward_cuda(
    const EmbeddingShape& shape, const float* grad_x, float* grad_table, cudaStream_t stream
);

// --- norm ---
struct NormShape {
  int64_t num_tokens = 0;
  int64_t hidden = 0;
  const float* x = nullptr;      // [num_tokens, hidden]
  const float* gain = nullptr;   // [hidden]
  float* inverse_rms = nullptr;  // [num_tokens] made by forward, used by backward
};
void rmsnorm_forward_cuda(const NormShape& shape, uint16_t* y, cudaStream_t stream);
// grad_x += the gradient for x; gain_terms [num_tokens, hidden] are what the gain's gradient sums.
void rmsnorm_backward_cuda(
    const NormShape& shape,
    const float* grad_y,
    float* grad_x,
    float* gain_terms,
    cudaStream_t stream
);

// --- router (router.cu) ---
struct RouterShape {
  int64_t num_tokens = 0;
  int num_experts = 0;
  int topk = 0;
  float* probs = nullptr;       // [num_tokens, num_experts]
  int32_t* topk_idx = nullptr;  // [num_tokens, topk]
  float* weights = nullptr;     // [num_tokens, topk]
};
// Turns logits in `probs` into probabilities and chooses. A token whose logits are not numbers gets
// no experts.
void choose_experts_cuda(const RouterShape& shape, cudaStream_t stream);
// grad_weights [num_tokens, topk], grad_probs [num_experts] for every token; grad_logits
// [num_tokens, num_experts].
void router_backward_cuda(
    const RouterShape& shape,
    const float* grad_weights,
    const float* grad_probs,
    uint16_t* grad_logits,
    cudaStream_t stream
);

// --- activation of an expert ---
// active [rows, inner] = silu(gate) * up * weight.
void swiglu_forward_cuda(const SwigluRows<uint16_t>& rows, uint16_t* active, cudaStream_t stream);
// grad_active [rows, inner]; grad_gate_up [rows, 2 * inner]; grad_weight [rows].
void swiglu_backward_cuda(
    const SwigluRows<uint16_t>& rows,
    const uint16_t* grad_active,
    uint16_t* grad_gate_up,
    float* grad_weight,
    cudaStream_t stream
);

// --- loss ---
struct LossShape {
  int64_t num_tokens = 0;
  int64_t num_classes = 0;
  const float* logits = nullptr;     // [num_tokens, num_classes]
  const uint8_t* targets = nullptr;  // [num_tokens]
  float scale = 1;
};
// losses [num_tokens] in nats, not scaled; grad_logits [num_tokens, num_classes], scaled.
void cross_entropy_cuda(
    const LossShape& shape, float* losses, uint16_t* grad_logits, cudaStream_t stream
);

// --- AdamW ---
struct DeviceMoments {
  float* mean = nullptr;
  float* square = nullptr;
};
// All [size]; `rounded` gets the new values in bf16.
void adamw_update_cuda(
    const AdamStep& step,
    float* value,
    const float* grad,
    const DeviceMoments& moments,
    uint16_t* rounded,
    size_t size,
    cudaStream_t stream
);

}  // namespace weft::moe
