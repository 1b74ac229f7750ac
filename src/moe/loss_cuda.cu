// SPDX-License-Identifier: Apache-2.0
#include "core/half.hpp"
#include "moe/kernels_cuda.hpp"
#include "moe/row_cuda.cuh"

namespace weft::moe {
namespace {

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

}  // namespace

void cross_entropy_cuda(
    const LossShape& shape, float* losses, uint16_t* grad_logits, cudaStream_t stream
) {
  if (shape.num_tokens > 0) {
    const unsigned blocks = num_blocks(shape.num_tokens, kRowsPerBlock);
    cross_entropy_kernel<<<blocks, kRowThreads, 0, stream>>>(shape, losses, grad_logits);
    WEFT_CUDA(Context{}, cudaGetLastError());
  }
}

}  // namespace weft::moe
