// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/fabric.hpp"

#include <sys/random.h>
#include <utility>

namespace weft::ofi {
namespace {

// Whoever knows a key can write, so keys start where nobody guesses if there is room for that.
uint64_t first_key(const fi_info& info) {
  uint64_t key = 0;
  const bool is_wide = info.domain_attr->mr_key_size >= sizeof key;
  if (!is_wide || ::getrandom(&key, sizeof key, 0) != static_cast<ssize_t>(sizeof key)) {
    return 1;
  }
  return key >> 1;  // counting on never reaches FI_KEY_NOTAVAIL
}

}  // namespace

Fabric::Fabric(const Provider& provider, Info info, const Context& context)
    : provider_(&provider),
      context_(context),
      info_(std::move(info)),
      gpu_memory_obstacle_((info_->caps & FI_HMEM) != 0 ? "" : "FI_HMEM was not asked for"),
      next_key_(first_key(*info_)) {
  fid_fabric* fabric = nullptr;
  check_call(context_, name(), "fi_fabric", api().fabric(info_->fabric_attr, &fabric, nullptr));
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  check_call(context_, name(), "fi_domain", fi_domain(fabric, info_.get(), &domain, nullptr));
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
  const std::string call = fmt::format("fi_mr_regattr of {} B", memory.bytes);
  check_call(
      context_,
      name(),
      call,
      fi_mr_regattr(domain_.get(), &attributes, 0, &registered),
      ErrorCode::kOutOfMemory
  );
  Owned<fid_mr> owned(registered);
  if (binds_memory()) {
    const ErrorCode code = ErrorCode::kOutOfMemory;
    check_call(context_, name(), "fi_mr_bind", fi_mr_bind(registered, &endpoint->fid, 0), code);
    check_call(context_, name(), "fi_mr_enable", fi_mr_enable(registered), code);
  }
  return owned;
}

}  // namespace weft::ofi
