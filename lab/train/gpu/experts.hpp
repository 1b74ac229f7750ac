// SPDX-License-Identifier: Apache-2.0
// This rank's experts of one block on a GPU: layers/experts.hpp in bf16, for gpu/block.hpp.
#pragma once

#include <cstdint>

#include "train/gpu/kernels.hpp"
#include "train/gpu/linear.hpp"
#include "train/layers/experts.hpp"

namespace weft::moe {

using DeviceExperts = Experts<DeviceLinear>;

inline void swiglu_forward(
    const DeviceLinear& linear, const SwigluRows<uint16_t>& rows, uint16_t* active
) {
  swiglu_forward_cuda(rows, active, linear.stream());
}

inline void swiglu_backward(
    const DeviceLinear& linear,
    const SwigluRows<uint16_t>& rows,
    const uint16_t* grad_active,
    uint16_t* grad_gate_up,
    float* grad_weight
) {
  swiglu_backward_cuda(rows, grad_active, grad_gate_up, grad_weight, linear.stream());
}

}  // namespace weft::moe
