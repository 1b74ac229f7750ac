// SPDX-License-Identifier: Apache-2.0
#include <cblas.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cstdlib>
#include <dlfcn.h>
#include <functional>
#include <string>

#include "core/check.hpp"
#include "train/layers/math.hpp"

namespace weft::moe {
namespace {

constexpr const char* kLibrary = "libopenblas.so.0";

// Returns OpenBLAS's name for kernels that suit the processor; null where the library knows better.
const char* kernels_for(int64_t targets) {
  if ((targets & HWY_AVX3) != 0) {
    return "SkylakeX";
  }
  return (targets & HWY_AVX2) != 0 ? "Haswell" : nullptr;
}

using Sgemm = decltype(&cblas_sgemm);

struct Loaded {
  Sgemm sgemm = nullptr;
  std::string obstacle;
};

// OpenBLAS, loaded by hand before main. Only so can it be told, through its environment variables,
// to start no threads of its own, because the ranks already share the cores, and which kernels to
// use: it knows processors by model number and takes its slowest kernels for one newer than itself.
// NOLINTBEGIN(concurrency-mt-unsafe): there is one thread yet.
Loaded load() {
  ::setenv("OPENBLAS_NUM_THREADS", "1", 1);
  if (const char* kernels = kernels_for(hwy::SupportedTargets()); kernels != nullptr) {
    ::setenv("OPENBLAS_CORETYPE", kernels, 0);
  }
  Loaded loaded;
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  void* sgemm = library != nullptr ? ::dlsym(library, "cblas_sgemm") : nullptr;
  if (sgemm == nullptr) {
    loaded.obstacle = ::dlerror();
  }
  loaded.sgemm = reinterpret_cast<Sgemm>(sgemm);
  return loaded;
}
// NOLINTEND(concurrency-mt-unsafe)

const Loaded kLoaded = load();

// c [m, n] = op(a) [m, k] * op(b) [k, n] + beta * c.
void multiply(
    int64_t m,
    int64_t n,
    int64_t k,
    CBLAS_TRANSPOSE op_a,
    const float* a,
    CBLAS_TRANSPOSE op_b,
    const float* b,
    float beta,
    float* c
) {
  const auto size = [](int64_t number) { return static_cast<int>(number); };
  if (m == 0 || n == 0 || k == 0) {
    return;
  }
  check_blas();
  kLoaded.sgemm(
      CblasRowMajor,
      op_a,
      op_b,
      size(m),
      size(n),
      size(k),
      1.0F,
      a,
      size(op_a == CblasNoTrans ? k : m),
      b,
      size(op_b == CblasNoTrans ? n : k),
      beta,
      c,
      size(n)
  );
}

}  // namespace

void check_blas() {
  WEFT_CHECK(
      Context{},
      kLoaded.sgemm != nullptr,
      ErrorCode::kNotAvailable,
      "open: {} (needed for matrix products). Install libopenblas0",
      kLoaded.obstacle
  );
}

void Math::forward(const ProductShape& s, const float* x, const float* w, float* y) {
  multiply(s.rows, s.out, s.in, CblasNoTrans, x, CblasTrans, w, 0.0F, y);
}

void Math::backward_input(
    const ProductShape& s, const float* grad_y, const float* w, float* grad_x
) {
  multiply(s.rows, s.in, s.out, CblasNoTrans, grad_y, CblasNoTrans, w, 0.0F, grad_x);
}

void Math::add_backward_input(
    const ProductShape& s, const float* grad_y, const float* w, float* grad_x
) {
  product_.resize(static_cast<size_t>(s.rows * s.in));
  backward_input(s, grad_y, w, product_.data());
  std::transform(product_.begin(), product_.end(), grad_x, grad_x, std::plus<>());
}

void Math::add_backward_weight(
    const ProductShape& s, const float* grad_y, const float* x, float* grad_w
) {
  multiply(s.out, s.in, s.rows, CblasTrans, grad_y, CblasNoTrans, x, 1.0F, grad_w);
}

}  // namespace weft::moe
