// SPDX-License-Identifier: Apache-2.0
#include "moe/linear_cuda.hpp"

namespace weft::moe {
namespace {

// What cuBLAS itself takes on Hopper. Given, because it must not allocate in between.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

int size(int64_t n) {
  return static_cast<int>(n);
}

}  // namespace

// Column-major: c [m, n] = op(a) * op(b) + beta * c, with bf16 factors. A row-major matrix is the
// transpose of a column-major one with as long columns.
struct DeviceLinear::Product {
  int op_a = CublasApi::kNoTranspose;
  int op_b = CublasApi::kNoTranspose;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const uint16_t* a = nullptr;
  int64_t lda = 0;
  const uint16_t* b = nullptr;
  int64_t ldb = 0;
  float beta = 0;
  void* c = nullptr;
  cudaDataType type_c = CUDA_R_32F;
};

DeviceLinear::DeviceLinear(cudaStream_t stream) : stream_(stream), workspace_(kWorkspaceBytes) {
  const CublasApi& api = cublas();
  WEFT_CUBLAS(api.create(&handle_));
  try {
    WEFT_CUBLAS(api.set_stream(handle_, stream_));
    WEFT_CUBLAS(api.set_workspace(handle_, workspace_.data(), workspace_.size()));
  } catch (...) {
    static_cast<void>(api.destroy(handle_));
    throw;
  }
}

DeviceLinear::~DeviceLinear() {
  static_cast<void>(cublas().destroy(handle_));
}

void DeviceLinear::run(const Product& p) {
  if (p.m == 0 || p.n == 0 || p.k == 0) {
    return;
  }
  const float alpha = 1.0F;
  WEFT_CUBLAS(cublas().gemm(
      handle_,
      p.op_a,
      p.op_b,
      size(p.m),
      size(p.n),
      size(p.k),
      &alpha,
      p.a,
      CUDA_R_16BF,
      size(p.lda),
      p.b,
      CUDA_R_16BF,
      size(p.ldb),
      &p.beta,
      p.c,
      p.type_c,
      size(p.m),
      CublasApi::kComputeFloat32,
      CublasApi::kDefaultAlgorithm
  ));
}

namespace {

template <class Product>
Product forward_product(
    const DeviceLinear::Shape& shape, const uint16_t* x, const uint16_t* w, Product product
) {
  product.op_a = CublasApi::kTranspose;
  product.m = shape.out;
  product.n = shape.rows;
  product.k = shape.in;
  product.a = w;
  product.lda = shape.in;
  product.b = x;
  product.ldb = shape.in;
  return product;
}

template <class Product>
Product input_product(
    const DeviceLinear::Shape& shape, const uint16_t* grad_y, const uint16_t* w, Product product
) {
  product.m = shape.in;
  product.n = shape.rows;
  product.k = shape.out;
  product.a = w;
  product.lda = shape.in;
  product.b = grad_y;
  product.ldb = shape.out;
  return product;
}

}  // namespace

void DeviceLinear::forward(const Shape& shape, const uint16_t* x, const uint16_t* w, float* y) {
  run(forward_product(shape, x, w, Product{.c = y}));
}

void DeviceLinear::forward(const Shape& shape, const uint16_t* x, const uint16_t* w, uint16_t* y) {
  run(forward_product(shape, x, w, Product{.c = y, .type_c = CUDA_R_16BF}));
}

void DeviceLinear::backward_input(
    const Shape& shape, const uint16_t* grad_y, const uint16_t* w, uint16_t* grad_x
) {
  run(input_product(shape, grad_y, w, Product{.c = grad_x, .type_c = CUDA_R_16BF}));
}

void DeviceLinear::add_backward_input(
    const Shape& shape, const uint16_t* grad_y, const uint16_t* w, float* grad_x
) {
  run(input_product(shape, grad_y, w, Product{.beta = 1, .c = grad_x}));
}

void DeviceLinear::add_backward_weight(
    const Shape& shape, const uint16_t* grad_y, const uint16_t* x, float* grad_w
) {
  run(
      {.op_b = CublasApi::kTranspose,
       .m = shape.in,
       .n = shape.out,
       .k = shape.rows,
       .a = x,
       .lda = shape.in,
       .b = grad_y,
       .ldb = shape.out,
       .beta = 1,
       .c = grad_w}
  );
}

}  // namespace weft::moe
