// SPDX-License-Identifier: Apache-2.0
#include "moe/blas.hpp"

#include <hwy/targets.h>

#include <cstdint>
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

struct Loaded {
  Blas blas;
  std::string obstacle;
};

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
  loaded.blas.sgemm = reinterpret_cast<decltype(&cblas_sgemm)>(sgemm);
  return loaded;
}
// NOLINTEND(concurrency-mt-unsafe)

const Loaded kLoaded = load();

}  // namespace

const Blas& blas() {
  WEFT_CHECK(
      Context{},
      kLoaded.blas.sgemm != nullptr,
      ErrorCode::kNotAvailable,
      "open: {} (needed for matrix products). Install libopenblas0",
      kLoaded.obstacle
  );
  return kLoaded.blas;
}

}  // namespace weft::moe
