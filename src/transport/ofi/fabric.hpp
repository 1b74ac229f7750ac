// SPDX-License-Identifier: Apache-2.0
// One opened provider of one rank: its fabric, its domain, and how memory becomes reachable in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "transport/ofi/api.hpp"
#include "transport/ofi/providers.hpp"
#include "weft/tensor.hpp"

namespace weft::ofi {

class Fabric {
 public:
  // Throws Error (kNotAvailable) naming provider and call.
  Fabric(const Provider& provider, Info info, const Context& context);
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  [[nodiscard]] const Provider& provider() const { return *provider_; }
  [[nodiscard]] std::string_view name() const { return info_->fabric_attr->prov_name; }
  [[nodiscard]] fi_info* info() const { return info_.get(); }
  [[nodiscard]] fid_fabric* fabric() const { return fabric_.get(); }
  [[nodiscard]] fid_domain* domain() const { return domain_.get(); }
  [[nodiscard]] const Context& context() const { return context_; }

  // Sources of writes and messages must be registered.
  [[nodiscard]] bool needs_local() const { return has_mode(FI_MR_LOCAL); }
  // Peers name memory by the owner's addresses, else by offsets.
  [[nodiscard]] bool has_addresses() const { return has_mode(FI_MR_VIRT_ADDR); }
  // Memory belongs to one endpoint.
  [[nodiscard]] bool binds_memory() const { return has_mode(FI_MR_ENDPOINT); }

  // Why memory of GPUs cannot be registered; empty: it can. Set-up finds out.
  [[nodiscard]] const std::string& gpu_memory_obstacle() const { return gpu_memory_obstacle_; }
  void refuse_gpu_memory(std::string why) { gpu_memory_obstacle_ = std::move(why); }

  struct Memory {
    const void* data = nullptr;
    uint64_t bytes = 0;
    Device device = {};
  };
  // Registers memory for as long as the result lives; `endpoint` is used where memory is bound to
  // one. Throws Error (kOutOfMemory).
  [[nodiscard]] Owned<fid_mr> add_memory(const Memory& memory, uint64_t access, fid_ep* endpoint);

 private:
  [[nodiscard]] bool has_mode(int bit) const { return (info_->domain_attr->mr_mode & bit) != 0; }

  const Provider* provider_;
  Context context_;
  Info info_;
  std::string gpu_memory_obstacle_;
  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  std::atomic<uint64_t> next_key_;  // asked for where the provider makes none itself
};

}  // namespace weft::ofi
