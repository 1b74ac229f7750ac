// SPDX-License-Identifier: Apache-2.0
#include "core/half.hpp"
#include "moe/kernels_cuda.hpp"
#include "moe/row_cuda.cuh"

namespace weft::moe {
namespace {

__device__ float sigmoid(float x) {
  return 1.0F / (1.0F + expf(-x));
}

__global__ void swiglu_kernel(SwigluShape shape, uint16_t* active) {
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
    SwigluShape shape, const uint16_t* grad_active, uint16_t* grad_gate_up, float* grad_weight
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

void swiglu_forward_cuda(const SwigluShape& shape, uint16_t* active, cudaStream_t stream) {
  if (shape.rows > 0) {
    const unsigned blocks = num_blocks(shape.rows, kRowsPerBlock);
    swiglu_kernel<<<blocks, kRowThreads, 0, stream>>>(shape, active);
    WEFT_CUDA(Context{}, cudaGetLastError());
  }
}

void swiglu_backward_cuda(
    const SwigluShape& shape,
    const uint16_t* grad_active,
    uint16_t* grad_gate_up,
    float* grad_weight,
    cudaStream_t stream
) {
  if (shape.rows > 0) {
    const unsigned blocks = num_blocks(shape.rows, kRowsPerBlock);
    swiglu_backward_kernel<<<blocks, kRowThreads, 0, stream>>>(
        shape, grad_active, grad_gate_up, grad_weight
    );
    WEFT_CUDA(Context{}, cudaGetLastError());
  }
}

}  // namespace weft::moe
