// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/api.hpp"

#include <cstdlib>
#include <dlfcn.h>

namespace weft::ofi {
namespace {

constexpr const char* kLibrary = "libfabric.so.1";

// The structures of libfabric have grown at their ends only, so the oldest symbols that know all
// members used here serve every newer library too.
void* find(void* library, const char* name, const char* version) {
  void* symbol = ::dlvsym(library, name, version);
  return symbol != nullptr ? symbol : ::dlsym(library, name);
}

template <class Function>
void load(Api& api, Function& function, void* library, const char* name, const char* version) {
  function = reinterpret_cast<Function>(find(library, name, version));
  if (function == nullptr && api.obstacle.empty()) {
    api.obstacle = fmt::format("{} has no function {}", kLibrary, name);
  }
}

Api open_library() {
  Api api;
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = ::dlerror();
    api.obstacle = fmt::format(
        "libfabric cannot be loaded: {}. Debian and Ubuntu have it in package libfabric1",
        reason != nullptr ? reason : kLibrary
    );
    return api;
  }
  decltype(&::fi_version) version = nullptr;
  load(api, version, library, "fi_version", "FABRIC_1.0");
  load(api, api.getinfo, library, "fi_getinfo", "FABRIC_1.3");
  load(api, api.freeinfo, library, "fi_freeinfo", "FABRIC_1.3");
  load(api, api.dupinfo, library, "fi_dupinfo", "FABRIC_1.3");
  load(api, api.fabric, library, "fi_fabric", "FABRIC_1.1");
  load(api, api.strerror, library, "fi_strerror", "FABRIC_1.0");
  if (api.obstacle.empty()) {
    const uint32_t number = version();
    api.version = fmt::format("{}.{}", FI_MAJOR(number), FI_MINOR(number));
    if (FI_VERSION_LT(number, kApiVersion)) {
      api.obstacle = fmt::format(
          "{} is version {} (at least {}.{})",
          kLibrary,
          api.version,
          FI_MAJOR(kApiVersion),
          FI_MINOR(kApiVersion)
      );
    }
  }
  return api;  // never closed: its threads and handlers may outlive any of us
}

}  // namespace

const Api& api() {
  static const Api loaded = open_library();
  return loaded;
}

std::string error_text(int64_t error) {
  const auto number = static_cast<int>(std::abs(error));
  return fmt::format("{} ({})", api().strerror(number), number);
}

void check_call(
    const Context& context,
    std::string_view provider,
    std::string_view call,
    int64_t result,
    ErrorCode code
) {
  WEFT_CHECK(context, result >= 0, code, "{}: {}, provider {}", call, error_text(result), provider);
}

}  // namespace weft::ofi
