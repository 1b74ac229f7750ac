// SPDX-License-Identifier: Apache-2.0
#include "moe/cublas_cuda.hpp"

#include <dlfcn.h>
#include <glob.h>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "core/env.hpp"

namespace weft::moe {
namespace {

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
