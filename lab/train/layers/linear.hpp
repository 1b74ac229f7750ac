// SPDX-License-Identifier: Apache-2.0
// y = x * w^T, the only place that multiplies matrices.
#pragma once

#include <cstdint>

#include "train/layers/matrix.hpp"

namespace weft::moe {

// y [n, out] = x [n, in] * w^T, with w [out, in].
void linear_forward(ConstRows x, const float* w, Rows y);
// grad_x [n, in] = grad_y [n, out] * w.
void linear_backward_input(ConstRows grad_y, const float* w, Rows grad_x);
// grad_w [out, in] += grad_y^T * x.
void linear_backward_weight(ConstRows grad_y, ConstRows x, float* grad_w);

// Throws Error (kNotAvailable) if the library of products could not be loaded.
void check_blas();

// The same for tokens, shard by shard.
void linear_forward(ConstRows x, const Parameter& w, Rows y, const Shards& shards);
// Overwrites grad_x.
void linear_backward(
    ConstRows grad_y, ConstRows x, const Parameter& w, Rows grad_x, const Shards& shards
);

}  // namespace weft::moe
