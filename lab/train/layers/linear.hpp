// SPDX-License-Identifier: Apache-2.0
// y = x * w^T: the only place on the host that multiplies matrices (gpu/linear.hpp on a GPU).
#pragma once

#include <cstdint>
#include <vector>

#include "train/layers/matrix.hpp"

namespace weft::moe {

// y [n, out] = x [n, in] * w^T, with w [out, in].
void linear_forward(ConstRows x, const float* w, Rows y);
// grad_x [n, in] = grad_y [n, out] * w.
void linear_backward_input(ConstRows grad_y, const float* w, Rows grad_x);
// grad_w [out, in] += grad_y^T * x.
void linear_backward_weight(ConstRows grad_y, ConstRows x, float* grad_w);

// A product with w [out, in]; the number of rows differs by call.
struct ProductShape {
  int64_t rows = 0;
  int64_t in = 0;
  int64_t out = 0;
};

// The same by pointers, as layers that also run on a GPU call them; in fp32.
struct HostLinear {
  using Value = float;
  template <class T>
  using Array = std::vector<T>;

  void forward(const ProductShape& s, const float* x, const float* w, float* y) const {
    linear_forward({x, s.rows, s.in}, w, {y, s.rows, s.out});
  }
  void backward_input(const ProductShape& s, const float* grad_y, const float* w, float* gx) const {
    linear_backward_input({grad_y, s.rows, s.out}, w, {gx, s.rows, s.in});
  }
  void add_backward_weight(
      const ProductShape& s, const float* grad_y, const float* x, float* grad_w
  ) const {
    linear_backward_weight({grad_y, s.rows, s.out}, {x, s.rows, s.in}, grad_w);
  }
};
inline constexpr HostLinear kHostLinear;

// Throws Error (kNotAvailable) if the library of products could not be loaded.
void check_blas();

// The same for tokens, shard by shard.
void linear_forward(ConstRows x, const Parameter& w, Rows y, const Shards& shards);
// Overwrites grad_x.
void linear_backward(
    ConstRows grad_y, ConstRows x, const Parameter& w, Rows grad_x, const Shards& shards
);

}  // namespace weft::moe
