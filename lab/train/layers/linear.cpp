// SPDX-License-Identifier: Apache-2.0
#include "train/layers/linear.hpp"

#include <cblas.h>
#include <hwy/targets.h>

#include <cstdlib>
#include <dlfcn.h>
#include <string>

#include "core/check.hpp"

namespace weft::moe {
namespace {

constexpr const char* kLibrary = "libopenblas.so.0";

// By what the processor can do. Null where the library knows better.
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

struct Factor {
  CBLAS_TRANSPOSE op;
  const float* data;
  int64_t cols;  // as it lies in memory
};

// c [m, n] = op(a) [m, k] * op(b) [k, n] + beta * c.
void multiply(
    int64_t m, int64_t n, int64_t k, const Factor& a, const Factor& b, float beta, float* c
) {
  const auto size = [](int64_t number) { return static_cast<int>(number); };
  if (m == 0 || n == 0 || k == 0) {
    return;
  }
  check_blas();
  kLoaded.sgemm(
      CblasRowMajor,
      a.op,
      b.op,
      size(m),
      size(n),
      size(k),
      1.0F,
      a.data,
      size(a.cols),
      b.data,
      size(b.cols),
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

void linear_forward(ConstRows x, const float* w, Rows y) {
  const Factor rows = {CblasNoTrans, x.data, x.cols};
  multiply(x.rows, y.cols, x.cols, rows, {CblasTrans, w, x.cols}, 0.0F, y.data);
}

void linear_backward_input(ConstRows grad_y, const float* w, Rows grad_x) {
  const Factor rows = {CblasNoTrans, grad_y.data, grad_y.cols};
  const Factor weights = {CblasNoTrans, w, grad_x.cols};
  multiply(grad_y.rows, grad_x.cols, grad_y.cols, rows, weights, 0.0F, grad_x.data);
}

void linear_backward_weight(ConstRows grad_y, ConstRows x, float* grad_w) {
  const Factor grads = {CblasTrans, grad_y.data, grad_y.cols};
  multiply(grad_y.cols, x.cols, x.rows, grads, {CblasNoTrans, x.data, x.cols}, 1.0F, grad_w);
}

void linear_forward(ConstRows x, const Parameter& w, Rows y, const Shards& shards) {
  for (const Range& shard : shards) {
    linear_forward(slice(x, shard), w.value.data(), slice(y, shard));
  }
}

void linear_backward(
    ConstRows grad_y, ConstRows x, const Parameter& w, Rows grad_x, const Shards& shards
) {
  for (size_t i = 0; i < shards.size(); ++i) {
    const ConstRows gy = slice(grad_y, shards[i]);
    linear_backward_weight(gy, slice(x, shards[i]), w.grad_of(i).data());
    linear_backward_input(gy, w.value.data(), slice(grad_x, shards[i]));
  }
}

}  // namespace weft::moe
