// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "core/half.hpp"
#include "train/gpu/kernels.hpp"
#include "train/gpu/row.cuh"
#include "train/layers/dense.hpp"

namespace weft::moe {
namespace {

// What one step does alike to every element.
struct Rates {
  float decay = 1;
  float rate = 0;
  float epsilon = 0;
  float beta1 = 0;
  float beta2 = 0;
};

__global__ void adamw_kernel(
    Rates rates,
    float* value,
    const float* grad,
    DeviceMoments moments,
    uint16_t* rounded,
    int64_t size
) {
  const int64_t i = flat_index();
  if (i >= size) {
    return;
  }
  const float mean = rates.beta1 * moments.mean[i] + (1.0F - rates.beta1) * grad[i];
  const float square = rates.beta2 * moments.square[i] + (1.0F - rates.beta2) * grad[i] * grad[i];
  moments.mean[i] = mean;
  moments.square[i] = square;
  value[i] = value[i] * rates.decay - rates.rate * mean / (sqrtf(square) + rates.epsilon);
  rounded[i] = float_to_bf16(value[i]);
}

__global__ void to_bf16_kernel(const float* from, uint16_t* to, int64_t size) {
  const int64_t i = flat_index();
  if (i < size) {
    to[i] = float_to_bf16(from[i]);
  }
}

__global__ void to_float_kernel(const uint16_t* from, float* to, int64_t size) {
  const int64_t i = flat_index();
  if (i < size) {
    to[i] = bf16_to_float(from[i]);
  }
}

__global__ void add_kernel(const uint16_t* from, float* to, int64_t size) {
  const int64_t i = flat_index();
  if (i < size) {
    to[i] += bf16_to_float(from[i]);
  }
}

// A thread sums one column over the rows of part blockIdx.y.
__global__ void sum_parts_kernel(ColumnSums call) {
  const int64_t col = flat_index();
  if (col >= call.cols) {
    return;
  }
  const int64_t part = blockIdx.y;
  const int64_t end = call.rows * (part + 1) / kSumParts;
  float sum = 0.0F;
  for (int64_t row = call.rows * part / kSumParts; row < end; ++row) {
    sum += call.values[row * call.cols + col];
  }
  call.scratch[part * call.cols + col] = sum;
}

__global__ void add_parts_kernel(ColumnSums call) {
  const int64_t col = flat_index();
  if (col >= call.cols) {
    return;
  }
  float sum = 0.0F;
  for (int64_t part = 0; part < kSumParts; ++part) {
    sum += call.scratch[part * call.cols + col];
  }
  call.sums[col] = call.adds ? call.sums[col] + sum : sum;
}

constexpr int kThreads = 128;

// A block makes the token blockIdx.x.
__global__ void embed_kernel(EmbeddingShape shape, const float* table, float* x) {
  const int64_t token = blockIdx.x;
  const uint8_t* window = shape.windows + token * shape.window;
  for (int64_t h = threadIdx.x; h < shape.hidden; h += kThreads) {
    float sum = 0.0F;
    for (int64_t p = 0; p < shape.window; ++p) {
      sum += table[(p * kNumBytes + window[p]) * shape.hidden + h];
    }
    x[token * shape.hidden + h] = sum;
  }
}

// A block sums the gradients of one vector of the table, in token order: byte blockIdx.x at
// position blockIdx.y.
__global__ void embed_backward_kernel(
    EmbeddingShape shape, const float* grad_x, float* grad_table
) {
  const int64_t byte = blockIdx.x;
  const int64_t position = blockIdx.y;
  float* grad = grad_table + (position * kNumBytes + byte) * shape.hidden;
  for (int64_t h = threadIdx.x; h < shape.hidden; h += kThreads) {
    float sum = 0.0F;
    for (int64_t token = 0; token < shape.num_tokens; ++token) {
      if (shape.windows[token * shape.window + position] == byte) {
        sum += grad_x[token * shape.hidden + h];
      }
    }
    grad[h] = shape.adds ? grad[h] + sum : sum;
  }
}

__global__ void cross_entropy_kernel(LossShape shape, float* losses, uint16_t* grad_logits) {
  const int64_t token = warp_row();
  if (token >= shape.num_tokens) {
    return;
  }
  const float* logits = shape.logits + token * shape.num_classes;
  uint16_t* grad = grad_logits + token * shape.num_classes;
  const int64_t target = shape.targets[token];
  float largest = -INFINITY;
  for (int64_t c = lane_id(); c < shape.num_classes; c += kLanes) {
    largest = fmaxf(largest, logits[c]);
  }
  largest = warp_max(largest);
  float sum = 0.0F;
  for (int64_t c = lane_id(); c < shape.num_classes; c += kLanes) {
    sum += expf(logits[c] - largest);
  }
  sum = warp_sum(sum);
  for (int64_t c = lane_id(); c < shape.num_classes; c += kLanes) {
    const float prob = expf(logits[c] - largest) / sum;
    grad[c] = float_to_bf16((c == target ? prob - 1.0F : prob) * shape.scale);
  }
  if (lane_id() == 0) {
    losses[token] = largest - logits[target] + logf(sum);
  }
}

constexpr float kEpsilon = 1e-6F;  // as on the host

__global__ void norm_kernel(NormShape shape, uint16_t* y) {
  const int64_t token = warp_row();
  if (token >= shape.num_tokens) {
    return;
  }
  const float* in = shape.x + token * shape.hidden;
  float sum = 0.0F;
  for (int64_t h = lane_id(); h < shape.hidden; h += kLanes) {
    sum += in[h] * in[h];
  }
  sum = warp_sum(sum);
  const float scale = 1.0F / sqrtf(sum / static_cast<float>(shape.hidden) + kEpsilon);
  for (int64_t h = lane_id(); h < shape.hidden; h += kLanes) {
    y[token * shape.hidden + h] = float_to_bf16(in[h] * scale * shape.gain[h]);
  }
  if (lane_id() == 0) {
    shape.inverse_rms[token] = scale;
  }
}

__global__ void norm_backward_kernel(
    NormShape shape, const float* grad_y, float* grad_x, float* gain_terms
) {
  const int64_t token = warp_row();
  if (token >= shape.num_tokens) {
    return;
  }
  const int64_t first = token * shape.hidden;
  const float* in = shape.x + first;
  const float* gy = grad_y + first;
  const float scale = shape.inverse_rms[token];
  float dot = 0.0F;
  for (int64_t h = lane_id(); h < shape.hidden; h += kLanes) {
    dot += gy[h] * shape.gain[h] * in[h];
    gain_terms[first + h] = gy[h] * in[h] * scale;
  }
  // The scale depends on every element of the row.
  const float pull = warp_sum(dot) * scale * scale / static_cast<float>(shape.hidden);
  for (int64_t h = lane_id(); h < shape.hidden; h += kLanes) {
    grad_x[first + h] += scale * (gy[h] * shape.gain[h] - in[h] * pull);
  }
}

__device__ float sigmoid(float x) {
  return 1.0F / (1.0F + expf(-x));
}

__global__ void swiglu_kernel(SwigluRows<uint16_t> shape, uint16_t* active) {
  const int64_t row = warp_row();
  if (row >= shape.rows) {
    return;
  }
  const uint16_t* gates = shape.gate_up + row * 2 * shape.inner;
  const uint16_t* ups = gates + shape.inner;
  const float weight = shape.weight[row];
  for (int64_t f = lane_id(); f < shape.inner; f += kLanes) {
    const float gate = bf16_to_float(gates[f]);
    const float value = gate * sigmoid(gate) * bf16_to_float(ups[f]) * weight;
    active[row * shape.inner + f] = float_to_bf16(value);
  }
}

__global__ void swiglu_backward_kernel(
    SwigluRows<uint16_t> shape,
    const uint16_t* grad_active,
    uint16_t* grad_gate_up,
    float* grad_weight
) {
  const int64_t row = warp_row();
  if (row >= shape.rows) {
    return;
  }
  const int64_t first = row * 2 * shape.inner;
  const uint16_t* gates = shape.gate_up + first;
  const uint16_t* ups = gates + shape.inner;
  uint16_t* grad_gates = grad_gate_up + first;
  uint16_t* grad_ups = grad_gates + shape.inner;
  const float weight = shape.weight[row];
  float sum = 0.0F;
  for (int64_t f = lane_id(); f < shape.inner; f += kLanes) {
    const float gate = bf16_to_float(gates[f]);
    const float up = bf16_to_float(ups[f]);
    const float grad_out = bf16_to_float(grad_active[row * shape.inner + f]);
    const float s = sigmoid(gate);
    const float silu = gate * s;
    sum += grad_out * silu * up;
    const float grad = grad_out * weight;
    grad_ups[f] = float_to_bf16(grad * silu);
    grad_gates[f] = float_to_bf16(grad * up * (s + silu * (1.0F - s)));
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) {
    grad_weight[row] = sum;
  }
}

}  // namespace

void adamw_update_cuda(
    const AdamStep& step,
    float* value,
    const float* grad,
    const DeviceMoments& moments,
    uint16_t* rounded,
    size_t size,
    cudaStream_t stream
) {
  const float root_bias2 = std::sqrt(step.bias2);
  const Rates rates = {
      1.0F - step.learning_rate * step.weight_decay,
      step.learning_rate / step.bias1 * root_bias2,
      step.epsilon * root_bias2,
      step.beta1,
      step.beta2};
  const auto count = static_cast<int64_t>(size);
  launch_flat(adamw_kernel, count, stream, rates, value, grad, moments, rounded, count);
}

void to_bf16_cuda(const float* from, uint16_t* to, int64_t size, cudaStream_t stream) {
  launch_flat(to_bf16_kernel, size, stream, from, to, size);
}

void to_float_cuda(const uint16_t* from, float* to, int64_t size, cudaStream_t stream) {
  launch_flat(to_float_kernel, size, stream, from, to, size);
}

void add_cuda(const uint16_t* from, float* to, int64_t size, cudaStream_t stream) {
  launch_flat(add_kernel, size, stream, from, to, size);
}

void column_sums_cuda(const ColumnSums& call, cudaStream_t stream) {
  const unsigned blocks = num_blocks(call.cols, kFlatThreads);
  const dim3 parts(blocks, static_cast<unsigned>(kSumParts));
  launch(sum_parts_kernel, parts, kFlatThreads, stream, call);
  launch(add_parts_kernel, blocks, kFlatThreads, stream, call);
}

void embedding_forward_cuda(
    const EmbeddingShape& shape, const float* table, float* x, cudaStream_t stream
) {
  if (shape.num_tokens > 0) {
    const auto blocks = static_cast<unsigned>(shape.num_tokens);
    launch(embed_kernel, blocks, kThreads, stream, shape, table, x);
  }
}

void embedding_backward_cuda(
    const EmbeddingShape& shape, const float* grad_x, float* grad_table, cudaStream_t stream
) {
  const dim3 vectors(static_cast<unsigned>(kNumBytes), static_cast<unsigned>(shape.window));
  launch(embed_backward_kernel, vectors, kThreads, stream, shape, grad_x, grad_table);
}

void cross_entropy_cuda(
    const LossShape& shape, float* losses, uint16_t* grad_logits, cudaStream_t stream
) {
  launch_rows(cross_entropy_kernel, shape.num_tokens, stream, shape, losses, grad_logits);
}

void rmsnorm_forward_cuda(const NormShape& shape, uint16_t* y, cudaStream_t stream) {
  launch_rows(norm_kernel, shape.num_tokens, stream, shape, y);
}

void rmsnorm_backward_cuda(
    const NormShape& shape,
    const float* grad_y,
    float* grad_x,
    float* gain_terms,
    cudaStream_t stream
) {
  launch_rows(norm_backward_kernel, shape.num_tokens, stream, shape, grad_y, grad_x, gain_terms);
}

void swiglu_forward_cuda(const SwigluRows<uint16_t>& shape, uint16_t* active, cudaStream_t stream) {
  launch_rows(swiglu_kernel, shape.rows, stream, shape, active);
}

void swiglu_backward_cuda(
    const SwigluRows<uint16_t>& shape,
    const uint16_t* grad_active,
    uint16_t* grad_gate_up,
    float* grad_weight,
    cudaStream_t stream
) {
  launch_rows(
      swiglu_backward_kernel, shape.rows, stream, shape, grad_active, grad_gate_up, grad_weight
  );
}

}  // namespace weft::moe
