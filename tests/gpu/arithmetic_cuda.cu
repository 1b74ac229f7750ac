// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include "gpu/arithmetic_cases.hpp"

namespace weft::testing {
namespace {

template <class Result, Result (*kCase)(uint32_t)>
__global__ void evaluate(Result* results, uint32_t num_cases) {
  const uint32_t case_idx = blockIdx.x * blockDim.x + threadIdx.x;
  if (case_idx < num_cases) {
    results[case_idx] = kCase(case_idx);
  }
}

void check(cudaError_t status) {
  if (status != cudaSuccess) {
    throw std::runtime_error(cudaGetErrorString(status));
  }
}

template <class Result, Result (*kCase)(uint32_t)>
std::vector<Result> evaluate_all(uint32_t num_cases) {
  constexpr uint32_t kThreads = 256;
  std::vector<Result> results(num_cases);
  const size_t num_bytes = results.size() * sizeof(Result);
  Result* on_device = nullptr;
  check(cudaMalloc(&on_device, num_bytes));
  evaluate<Result, kCase>
      <<<(num_cases + kThreads - 1) / kThreads, kThreads>>>(on_device, num_cases);
  check(cudaGetLastError());
  check(cudaMemcpy(results.data(), on_device, num_bytes, cudaMemcpyDeviceToHost));
  check(cudaFree(on_device));
  return results;
}

}  // namespace

std::vector<HalfResult> half_results_cuda() {
  return evaluate_all<HalfResult, half_result>(kNumHalfCases);
}

std::vector<SlotResult> slot_results_cuda() {
  return evaluate_all<SlotResult, slot_result>(kNumSlotCases);
}

}  // namespace weft::testing
