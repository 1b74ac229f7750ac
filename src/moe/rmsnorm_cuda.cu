// SPDX-License-Identifier: Apache-2.0
#include "core/half.hpp"
#include "moe/kernels_cuda.hpp"
#include "moe/row_cuda.cuh"

namespace weft::moe {
namespace {

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

}  // namespace

void rmsnorm_forward_cuda(const NormShape& shape, uint16_t* y, cudaStream_t stream) {
  if (shape.num_tokens > 0) {
    const unsigned blocks = num_blocks(shape.num_tokens, kRowsPerBlock);
    norm_kernel<<<blocks, kRowThreads, 0, stream>>>(shape, y);
    WEFT_CUDA(Context{}, cudaGetLastError());
  }
}

void rmsnorm_backward_cuda(
    const NormShape& shape,
    const float* grad_y,
    float* grad_x,
    float* gain_terms,
    cudaStream_t stream
) {
  if (shape.num_tokens > 0) {
    const unsigned blocks = num_blocks(shape.num_tokens, kRowsPerBlock);
    norm_backward_kernel<<<blocks, kRowThreads, 0, stream>>>(shape, grad_y, grad_x, gain_terms);
    WEFT_CUDA(Context{}, cudaGetLastError());
  }
}

}  // namespace weft::moe
