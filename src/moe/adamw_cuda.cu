// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "core/half.hpp"
#include "moe/kernels_cuda.hpp"
#include "moe/row_cuda.cuh"

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
  if (size == 0) {
    return;
  }
  const float root_bias2 = std::sqrt(step.bias2);
  const Rates rates = {
      1.0F - step.learning_rate * step.weight_decay,
      step.learning_rate / step.bias1 * root_bias2,
      step.epsilon * root_bias2,
      step.beta1,
      step.beta2};
  const auto count = static_cast<int64_t>(size);
  adamw_kernel<<<num_blocks(count, kFlatThreads), kFlatThreads, 0, stream>>>(
      rates, value, grad, moments, rounded, count
  );
  WEFT_CUDA(Context{}, cudaGetLastError());
}

}  // namespace weft::moe
