// SPDX-License-Identifier: Apache-2.0
#include "moe/cublas_cuda.hpp"

#include <cstdlib>
#include <dlfcn.h>
#include <glob.h>
#include <string>
#include <vector>

namespace weft::moe {
namespace {

constexpr const char* kLibrary = "libcublas.so.13";

// Where toolkits and Python's packages put it.
constexpr const char* kFolders[] = {
    "/usr/local/cuda*/lib64/",
    "/usr/local/cuda*/targets/*/lib/",
    "/usr/lib/python3*/*-packages/nvidia/cu*/lib/",
    "/usr/lib/python3/*-packages/nvidia/cu*/lib/",
    "/usr/local/lib/python3*/*-packages/nvidia/cu*/lib/",
    "/opt/*/lib/python3*/site-packages/nvidia/cu*/lib/",
    "/root/.local/lib/python3*/site-packages/nvidia/cu*/lib/"};

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

// NOLINTBEGIN(concurrency-mt-unsafe): nobody changes the environment.
std::vector<std::string> candidates() {
  if (const char* chosen = std::getenv("WEFT_CUBLAS"); chosen != nullptr && *chosen != '\0') {
    return {chosen};
  }
  std::vector<std::string> paths = {kLibrary};
  for (const char* folder : kFolders) {
    for (std::string& path : matches(std::string(folder) + kLibrary)) {
      paths.push_back(std::move(path));
    }
  }
  if (const char* environment = std::getenv("VIRTUAL_ENV"); environment != nullptr) {
    const std::string packages = "/lib/python3*/site-packages/nvidia/cu*/lib/";
    for (std::string& path : matches(environment + packages + kLibrary)) {
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
// NOLINTEND(concurrency-mt-unsafe)

}  // namespace

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

}  // namespace weft::moe
