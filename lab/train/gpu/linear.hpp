// SPDX-License-Identifier: Apache-2.0
// y = x * w^T on a GPU: bf16 factors, sums in fp32. The only place there that multiplies matrices.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "train/gpu/device_array.hpp"

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

  // w [out, in]; the number of rows differs by call.
  struct Shape {
    int64_t rows = 0;
    int64_t in = 0;
    int64_t out = 0;
  };
  // y [rows, out] = x [rows, in] * w^T, in fp32 or rounded to bf16.
  void forward(const Shape& shape, const uint16_t* x, const uint16_t* w, float* y);
  void forward(const Shape& shape, const uint16_t* x, const uint16_t* w, uint16_t* y);
  // grad_x [rows, in] = grad_y [rows, out] * w, rounded to bf16.
  void backward_input(
      const Shape& shape, const uint16_t* grad_y, const uint16_t* w, uint16_t* grad_x
  );
  // grad_x += grad_y * w.
  void add_backward_input(
      const Shape& shape, const uint16_t* grad_y, const uint16_t* w, float* grad_x
  );
  // grad_w [out, in] += grad_y^T * x.
  void add_backward_weight(
      const Shape& shape, const uint16_t* grad_y, const uint16_t* x, float* grad_w
  );

  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  struct Product;
  void run(const Product& product);
  void run_forward(const Shape& shape, const uint16_t* x, const uint16_t* w, Product product);
  void run_backward_input(
      const Shape& shape, const uint16_t* grad_y, const uint16_t* w, Product product
  );

  cudaStream_t stream_;
  CublasHandle handle_ = nullptr;
  DeviceArray<std::byte> workspace_;
};

}  // namespace weft::moe
