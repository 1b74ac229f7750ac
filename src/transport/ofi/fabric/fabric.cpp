// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/fabric/fabric.hpp"

#include <cstdlib>
#include <dlfcn.h>
#include <utility>

#include "group/control_plane.hpp"

namespace weft::ofi {
namespace {

constexpr const char* kLibrary = "libfabric.so.1";

// The structures of libfabric have grown at their ends only, so the oldest symbols that know all
// members used here serve every newer library too.
template <class Function>
void load(Api& api, Function& function, void* library, const char* name, const char* version) {
  void* const versioned = ::dlvsym(library, name, version);
  function = reinterpret_cast<Function>(versioned != nullptr ? versioned : ::dlsym(library, name));
  if (function == nullptr && api.obstacle.empty()) {
    api.obstacle = fmt::format("{} has no function {}", kLibrary, name);
  }
}

Api open_library() {
  const KeptHandlers kept;
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
    api.rxm_buffer_bytes = Env::read().rxm_buffer_bytes;
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

// Returns the first key: a random one if there is room for that, as anyone who knows a key can
// write.
uint64_t first_key(const fi_info& info) {
  const bool is_wide = info.domain_attr->mr_key_size >= sizeof(uint64_t);
  return is_wide ? random_value<uint64_t>() >> 1 : 1;  // counting on never reaches FI_KEY_NOTAVAIL
}

}  // namespace

KeptHandlers::KeptHandlers() {
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction handler = {};
    if (::sigaction(signal, nullptr, &handler) == 0) {
      handlers_[static_cast<size_t>(signal)] = handler;
    }
  }
}

KeptHandlers::~KeptHandlers() {
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction now = {};
    const auto& before = handlers_[static_cast<size_t>(signal)];
    if (before && ::sigaction(signal, nullptr, &now) == 0 &&
        now.sa_sigaction != before->sa_sigaction) {
      ::sigaction(signal, &*before, nullptr);
    }
  }
}

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

Fabric::Fabric(const Provider& provider, Info info, const Context& context)
    : provider_(&provider),
      context_(context),
      info_(std::move(info)),
      gpu_memory_obstacle_((info_->caps & FI_HMEM) != 0 ? "" : "FI_HMEM was not asked for"),
      next_key_(first_key(*info_)) {
  const KeptHandlers kept;
  fid_fabric* fabric = nullptr;
  check("fi_fabric", api().fabric(info_->fabric_attr, &fabric, nullptr));
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  check("fi_domain", fi_domain(fabric, info_.get(), &domain, nullptr));
  domain_.reset(domain);
}

Owned<fid_mr> Fabric::add_memory(const Memory& memory, uint64_t access, fid_ep* endpoint) {
  const bool is_on_gpu = memory.device.kind == Device::Kind::kCuda;
  const iovec area = {.iov_base = const_cast<void*>(memory.data), .iov_len = memory.bytes};
  fi_mr_attr attributes = {};
  attributes.mr_iov = &area;
  attributes.iov_count = 1;
  attributes.access = access;
  attributes.requested_key = next_key_++;
  attributes.iface = is_on_gpu ? FI_HMEM_CUDA : FI_HMEM_SYSTEM;
  attributes.device.cuda = is_on_gpu ? memory.device.index : 0;
  fid_mr* registered = nullptr;
  const ErrorCode code = ErrorCode::kOutOfMemory;
  const int result = fi_mr_regattr(domain_.get(), &attributes, 0, &registered);
  check(fmt::format("fi_mr_regattr of {} B", memory.bytes), result, code);
  Owned<fid_mr> owned(registered);
  if (binds_memory()) {
    check("fi_mr_bind", fi_mr_bind(registered, &endpoint->fid, 0), code);
    check("fi_mr_enable", fi_mr_enable(registered), code);
  }
  return owned;
}

}  // namespace weft::ofi
