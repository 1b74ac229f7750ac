// SPDX-License-Identifier: Apache-2.0
// y = x * w^T on a GPU: bf16 factors, sums in fp32. The only place there that multiplies matrices.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <library_types.h>

#include "train/gpu/device_array.hpp"
#include "train/layers/linear.hpp"

namespace weft::moe {

using CublasHandle = struct cublasContext*;

// Throws Error (kNotAvailable) if there is no cuBLAS.
void check_cublas();

// Matrices in device memory, row after row, as linear.hpp has them on the host. Products of no rows
// do nothing. The same product gives the same bits each time.
class DeviceLinear {
 public:
  // All work goes to `stream` of the current GPU, where every call must come from.
  explicit DeviceLinear(cudaStream_t stream);
  ~DeviceLinear();
  DeviceLinear(const DeviceLinear&) = delete;
  DeviceLinear& operator=(const DeviceLinear&) = delete;

  using Value = uint16_t;  // of the factors: bf16
  template <class T>
  using Array = DeviceArray<T>;

  // y [rows, out] = x [rows, in] * w^T, in fp32 or rounded to bf16.
  template <class Y>
  void forward(const ProductShape& s, const uint16_t* x, const uint16_t* w, Y* y) {
    run({true, false, s.out, s.rows, s.in, w, s.in, x, s.in, 0, y, kTypeOf<Y>});
  }
  // grad_x [rows, in] = grad_y [rows, out] * w, rounded to bf16.
  void backward_input(
      const ProductShape& s, const uint16_t* grad_y, const uint16_t* w, uint16_t* grad_x
  ) {
    run({false, false, s.in, s.rows, s.out, w, s.in, grad_y, s.out, 0, grad_x, CUDA_R_16BF});
  }
  // grad_x += grad_y * w.
  void add_backward_input(
      const ProductShape& s, const uint16_t* grad_y, const uint16_t* w, float* grad_x
  ) {
    run({false, false, s.in, s.rows, s.out, w, s.in, grad_y, s.out, 1, grad_x, CUDA_R_32F});
  }
  // grad_w [out, in] += grad_y^T * x.
  void add_backward_weight(
      const ProductShape& s, const uint16_t* grad_y, const uint16_t* x, float* grad_w
  ) {
    run({false, true, s.in, s.out, s.rows, x, s.in, grad_y, s.out, 1, grad_w, CUDA_R_32F});
  }

  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  template <class T>
  static constexpr cudaDataType kTypeOf = sizeof(T) == sizeof(float) ? CUDA_R_32F : CUDA_R_16BF;

  // Column-major: c [m, n] = op(a) * op(b) + beta * c, with bf16 factors. A row-major matrix is the
  // transpose of a column-major one with as long columns.
  struct Product {
    bool transposes_a;
    bool transposes_b;
    int64_t m;
    int64_t n;
    int64_t k;
    const uint16_t* a;
    int64_t lda;
    const uint16_t* b;
    int64_t ldb;
    float beta;
    void* c;
    cudaDataType type_c;
  };
  void run(const Product& product);

  cudaStream_t stream_;
  CublasHandle handle_ = nullptr;
  DeviceArray<std::byte> workspace_;
};

}  // namespace weft::moe
