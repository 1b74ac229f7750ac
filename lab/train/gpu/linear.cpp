// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <glob.h>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/env.hpp"
#include "train/gpu/math.hpp"

#define WEFT_CUBLAS(expr) check((expr), #expr)

namespace weft::moe {
namespace {

// What cuBLAS itself takes on Hopper. Given, because it must not allocate in between.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

// The few functions and constants in use are declared here: building needs no header of cuBLAS.
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

constexpr const char* kLibrary = "libcublas.so.13";

// Where toolkits and Python's packages put it.
constexpr const char* kFolders[] = {
    "/usr/local/cuda*/lib64/",
    "/usr/local/cuda*/targets/*/lib/",
    "/usr/lib/python3*/*-packages/nvidia/cu*/lib/",
    "/usr/local/lib/python3*/*-packages/nvidia/cu*/lib/",
    "/opt/*/lib/python3*/site-packages/nvidia/cu*/lib/",
    "/opt/*/.venv/lib/python3*/site-packages/nvidia/cu*/lib/"};
constexpr const char* kPackages = "/lib/python3*/site-packages/nvidia/cu*/lib/";

struct Loaded {
  CublasApi api;
  std::string obstacle;
};

std::vector<std::string> matches(const std::string& pattern) {
  std::vector<std::string> paths;
  glob_t found = {};
  if (::glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  ::globfree(&found);
  return paths;
}

std::vector<std::string> candidates() {
  const Env env = Env::read();
  if (env.cublas) {
    return {*env.cublas};
  }
  std::vector<std::string> folders(std::begin(kFolders), std::end(kFolders));
  if (env.virtual_env) {
    folders.insert(folders.begin(), *env.virtual_env + kPackages);
  }
  if (env.home) {
    folders.push_back(*env.home + "/.local" + kPackages);
    folders.push_back(*env.home + "/.pyenv/versions/*" + kPackages);
  }
  std::vector<std::string> paths = {kLibrary};
  for (const std::string& folder : folders) {
    for (std::string& path : matches(folder + kLibrary)) {
      paths.push_back(std::move(path));
    }
  }
  return paths;
}

template <class Function>
void find(void* library, const char* name, Function& function, std::string& obstacle) {
  void* symbol = ::dlsym(library, name);
  if (symbol == nullptr) {
    obstacle = ::dlerror();
  }
  function = reinterpret_cast<Function>(symbol);
}

Loaded load() {
  Loaded loaded;
  void* library = nullptr;
  for (const std::string& path : candidates()) {
    library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) {
      break;
    }
    if (loaded.obstacle.empty()) {
      loaded.obstacle = ::dlerror();
    }
  }
  if (library == nullptr) {
    return loaded;
  }
  loaded.obstacle.clear();
  find(library, "cublasCreate_v2", loaded.api.create, loaded.obstacle);
  find(library, "cublasDestroy_v2", loaded.api.destroy, loaded.obstacle);
  find(library, "cublasSetStream_v2", loaded.api.set_stream, loaded.obstacle);
  find(library, "cublasSetWorkspace_v2", loaded.api.set_workspace, loaded.obstacle);
  find(library, "cublasGemmEx", loaded.api.gemm, loaded.obstacle);
  find(library, "cublasGetStatusString", loaded.api.status_text, loaded.obstacle);
  return loaded;
}

// cuBLAS, loaded by hand on first use, so that a machine without it runs everything else. Looks
// where WEFT_CUBLAS says, else in the system's library path, else among CUDA toolkits and Python
// packages.
const CublasApi& cublas() {
  static const Loaded loaded = load();
  WEFT_CHECK(
      Context{},
      loaded.obstacle.empty(),
      ErrorCode::kNotAvailable,
      "open: {} (needed for matrix products on a GPU). Install cuBLAS 13 or name the file in "
      "WEFT_CUBLAS",
      loaded.obstacle
  );
  return loaded.api;
}

// Throws Error (kCuda): "<expression>: <cuBLAS's text>".
void check(int status, const char* expression) {
  WEFT_CHECK(
      Context{}, status == 0, ErrorCode::kCuda, "{}: {}", expression, cublas().status_text(status)
  );
}

int size(int64_t n) {
  return static_cast<int>(n);
}

}  // namespace

void check_cublas() {
  static_cast<void>(cublas());
}

DeviceMath::DeviceMath(cudaStream_t stream) : stream_(stream), workspace_(kWorkspaceBytes) {
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

DeviceMath::~DeviceMath() {
  static_cast<void>(cublas().destroy(handle_));
}

void DeviceMath::run(const Product& p) {
  if (p.m == 0 || p.n == 0 || p.k == 0) {
    return;
  }
  const float alpha = 1.0F;
  WEFT_CUBLAS(cublas().gemm(
      handle_,
      p.transposes_a ? CublasApi::kTranspose : CublasApi::kNoTranspose,
      p.transposes_b ? CublasApi::kTranspose : CublasApi::kNoTranspose,
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

}  // namespace weft::moe
