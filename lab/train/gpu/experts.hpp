// SPDX-License-Identifier: Apache-2.0
// This rank's experts of one block on a GPU, as experts.hpp has them on the host: bf16 rows and
// weights, sums and gradients of weights in fp32.
#pragma once

#include <cstdint>
#include <span>

#include "moe/device_array_cuda.hpp"
#include "moe/linear_cuda.hpp"

namespace weft::moe {

// Device memory of the experts' parameters, laid out as Experts has them.
struct DeviceExpertWeights {
  const uint16_t* in = nullptr;   // [num_local_experts, 2 * inner, hidden]
  const uint16_t* out = nullptr;  // [num_local_experts, hidden, inner]
  float* grad_in = nullptr;
  float* grad_out = nullptr;
};

struct DeviceExpertRows {
  const uint16_t* x = nullptr;               // [num_rows, hidden] expert after expert
  const float* weight = nullptr;             // [num_rows]
  std::span<const int64_t> rows_per_expert;  // in host memory; padding included
};

class DeviceExperts {
 public:
  DeviceExperts(DeviceLinear& linear, const DeviceExpertWeights& weights, int hidden, int inner)
      : linear_(&linear), weights_(weights), hidden_(hidden), inner_(inner) {}

  // Queued on the stream of `linear`. y [num_rows, hidden].
  void forward(const DeviceExpertRows& rows, uint16_t* y);
  // Rows as in forward; grad_y, grad_x [num_rows, hidden]; grad_weight [num_rows].
  void backward(
      const DeviceExpertRows& rows, const uint16_t* grad_y, uint16_t* grad_x, float* grad_weight
  );
  // The rest of the backward, any time after it: adds to the weights' gradients. Rows and grad_y as
  // they were.
  void add_weight_gradients(const DeviceExpertRows& rows, const uint16_t* grad_y);

 private:
  DeviceLinear* linear_;
  DeviceExpertWeights weights_;
  int64_t hidden_;
  int64_t inner_;
  DeviceArray<uint16_t> gate_up_;  // [num_rows, 2 * inner] kept for backward
  DeviceArray<uint16_t> active_;   // [num_rows, inner] kept for backward
  DeviceArray<uint16_t> grad_gate_up_;
  DeviceArray<uint16_t> grad_active_;
};

}  // namespace weft::moe
