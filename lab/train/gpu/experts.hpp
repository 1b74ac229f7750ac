// SPDX-License-Identifier: Apache-2.0
// This rank's experts of one block on a GPU, as experts.hpp has them on the host: bf16 rows and
// weights, sums and gradients of weights in fp32.
#pragma once

#include <cstdint>
#include <span>

#include "train/gpu/device_array.hpp"
#include "train/gpu/linear.hpp"

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
  // Where an expert's part begins, in elements, and the shapes of its two products.
  struct Place {
    DeviceLinear::Shape into;
    DeviceLinear::Shape out_of;
    int64_t x = 0;
    int64_t gate_up = 0;
    int64_t active = 0;
    int64_t weight_in = 0;
    int64_t weight_out = 0;
  };
  template <class Visit>
  void for_each_expert(const DeviceExpertRows& rows, const Visit& visit) const;

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
