// SPDX-License-Identifier: Apache-2.0
#include "core/half.hpp"
#include "moe/kernels_cuda.hpp"
#include "moe/row_cuda.cuh"

namespace weft::moe {
namespace {

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

}  // namespace

void to_bf16_cuda(const float* from, uint16_t* to, int64_t size, cudaStream_t stream) {
  if (size > 0) {
    to_bf16_kernel<<<num_blocks(size, kFlatThreads), kFlatThreads, 0, stream>>>(from, to, size);
    WEFT_CUDA(Context{}, cudaGetLastError());
  }
}

void to_float_cuda(const uint16_t* from, float* to, int64_t size, cudaStream_t stream) {
  if (size > 0) {
    to_float_kernel<<<num_blocks(size, kFlatThreads), kFlatThreads, 0, stream>>>(from, to, size);
    WEFT_CUDA(Context{}, cudaGetLastError());
  }
}

void add_cuda(const uint16_t* from, float* to, int64_t size, cudaStream_t stream) {
  if (size > 0) {
    add_kernel<<<num_blocks(size, kFlatThreads), kFlatThreads, 0, stream>>>(from, to, size);
    WEFT_CUDA(Context{}, cudaGetLastError());
  }
}

void column_sums_cuda(const ColumnSums& call, cudaStream_t stream) {
  const unsigned blocks = num_blocks(call.cols, kFlatThreads);
  const dim3 parts(blocks, static_cast<unsigned>(kSumParts));
  sum_parts_kernel<<<parts, kFlatThreads, 0, stream>>>(call);
  add_parts_kernel<<<blocks, kFlatThreads, 0, stream>>>(call);
  WEFT_CUDA(Context{}, cudaGetLastError());
}

}  // namespace weft::moe
