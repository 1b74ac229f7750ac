// SPDX-License-Identifier: Apache-2.0
#include "nccl/rival_library.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <glob.h>
#include <memory>
#include <string_view>
#include <vector>

#include "core/check.hpp"

namespace weft::bench {
namespace {

constexpr const char* kInPackages = "/nvidia/nccl/lib/libnccl.so.2";

std::vector<std::string> matches(const std::string& pattern) {
  glob_t found = {};
  std::vector<std::string> paths;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  globfree(&found);
  return paths;
}

// Returns the path that the first python3 prints, as its packages may lie anywhere; empty: none.
std::string path_from_python() {
  constexpr const char* kCommand =
      "timeout 10 python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(kCommand, "r"), pclose);
  std::array<char, 4096> line = {};
  if (pipe == nullptr || std::fgets(line.data(), line.size(), pipe.get()) == nullptr) {
    return {};
  }
  const std::string_view folder(line.data());
  return std::string(folder.substr(0, folder.find('\n'))) + "/lib/libnccl.so.2";
}

std::vector<std::string> candidates() {
  const char* named = std::getenv("WEFT_NCCL");
  if (named != nullptr && *named != '\0') {
    return {named};
  }
  std::vector<std::string> paths = {"libnccl.so.2"};
  std::vector<std::string> roots = {"/usr", "/usr/local", "/opt/*", "/opt/*/envs/*"};
  for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    if (const char* root = std::getenv(variable); root != nullptr) {
      roots.emplace_back(root);
    }
  }
  if (const char* home = std::getenv("HOME"); home != nullptr) {
    roots.push_back(std::string(home) + "/.local");
  }
  for (const std::string& root : roots) {
    for (const char* folder : {"/lib/python3*/site-packages", "/lib/python3*/dist-packages"}) {
      for (std::string& path : matches(root + folder + kInPackages)) {
        paths.push_back(std::move(path));
      }
    }
  }
  if (std::string path = path_from_python(); !path.empty()) {
    paths.push_back(std::move(path));
  }
  return paths;
}

template <class Function>
void load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  WEFT_CHECK(
      Context{},
      function != nullptr,
      ErrorCode::kNotAvailable,
      "load(nccl): the library has no {}",
      name
  );
}

}  // namespace

NcclLibrary::NcclLibrary() {
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  void* library = nullptr;
  std::vector<std::string> tried;
  for (const std::string& path : candidates()) {
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) {
      path_ = path;
      break;
    }
    tried.emplace_back(dlerror());
  }
  WEFT_CHECK(
      Context{},
      library != nullptr,
      ErrorCode::kNotAvailable,
      "load(nccl): no library found ({}). Name one in WEFT_NCCL",
      fmt::join(tried, "; ")
  );
  load(library, "ncclGetVersion", api_.get_version);
  load(library, "ncclGetErrorString", api_.get_error_string);
  load(library, "ncclCommInitAll", api_.comm_init_all);
  load(library, "ncclCommDestroy", api_.comm_destroy);
  load(library, "ncclGroupStart", api_.group_start);
  load(library, "ncclGroupEnd", api_.group_end);
  load(library, "ncclSend", api_.send);
  load(library, "ncclRecv", api_.recv);
}

std::string NcclLibrary::version() const {
  int version = 0;
  check(api_.get_version(&version), "ncclGetVersion");
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void NcclLibrary::check(int result, const char* what) const {
  WEFT_CHECK(
      Context{},
      result == kNcclSuccess,
      ErrorCode::kNotAvailable,
      "{}: {}",
      what,
      api_.get_error_string(result)
  );
}

}  // namespace weft::bench
