// SPDX-License-Identifier: Apache-2.0
#include "moe/embedding.hpp"
#include "moe/kernels_cuda.hpp"
#include "moe/row_cuda.cuh"

namespace weft::moe {
namespace {

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

}  // namespace

void embedding_forward_cuda(
    const EmbeddingShape& shape, const float* table, float* x, cudaStream_t stream
) {
  if (shape.num_tokens > 0) {
    embed_kernel<<<static_cast<unsigned>(shape.num_tokens), kThreads, 0, stream>>>(shape, table, x);
    WEFT_CUDA(Context{}, cudaGetLastError());
  }
}

void embedding_backward_cuda(
    const EmbeddingShape& shape, const float* grad_x, float* grad_table, cudaStream_t stream
) {
  const dim3 vectors(static_cast<unsigned>(kNumBytes), static_cast<unsigned>(shape.window));
  embed_backward_kernel<<<vectors, kThreads, 0, stream>>>(shape, grad_x, grad_table);
  WEFT_CUDA(Context{}, cudaGetLastError());
}

}  // namespace weft::moe
