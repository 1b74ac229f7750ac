// SPDX-License-Identifier: Apache-2.0
// cuBLAS, loaded by hand on first use, so that a machine without it runs everything else. The few
// functions and constants in use are declared here: building needs no header of it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <library_types.h>

#include "core/check.hpp"

namespace weft::moe {

using CublasHandle = struct cublasContext*;

struct CublasApi {
  static constexpr int kNoTranspose = 0;
  static constexpr int kTranspose = 1;
  static constexpr int kComputeFloat32 = 68;
  static constexpr int kDefaultAlgorithm = -1;

  int (*create)(CublasHandle* handle) = nullptr;
  int (*destroy)(CublasHandle handle) = nullptr;
  int (*set_stream)(CublasHandle handle, cudaStream_t stream) = nullptr;
  int (*set_workspace)(CublasHandle handle, void* workspace, size_t bytes) = nullptr;
  // Column-major C [m, n] = alpha * op(A) * op(B) + beta * C.
  int (*gemm
  )(CublasHandle handle,
    int op_a,
    int op_b,
    int m,
    int n,
    int k,
    const void* alpha,
    const void* a,
    cudaDataType type_a,
    int lda,
    const void* b,
    cudaDataType type_b,
    int ldb,
    const void* beta,
    void* c,
    cudaDataType type_c,
    int ldc,
    int compute_type,
    int algorithm) = nullptr;
  const char* (*status_text)(int status) = nullptr;
};

// Looks where WEFT_CUBLAS says, else in the system's library path, else among CUDA toolkits and
// Python packages. Throws Error (kNotAvailable) if it is nowhere.
[[nodiscard]] const CublasApi& cublas();

// Throws Error (kCuda): "<expression>: <cuBLAS's text>".
inline void check_cublas(int status, const char* expression) {
  WEFT_CHECK(
      Context{}, status == 0, ErrorCode::kCuda, "{}: {}", expression, cublas().status_text(status)
  );
}

}  // namespace weft::moe

#define WEFT_CUBLAS(expr) ::weft::moe::check_cublas((expr), #expr)
