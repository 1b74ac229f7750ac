// SPDX-License-Identifier: Apache-2.0
// All GPU transports in one table, by name. A new one needs its source file and a line here.
#include <fmt/ranges.h>

#include <algorithm>

#include "core/check.hpp"
#include "cuda/transport/gpu_transport.hpp"

namespace weft {
namespace {

struct Entry {
  std::string_view name;
  // Throws Error (kNotAvailable) if this machine does not allow the transport.
  std::unique_ptr<GpuTransport> (*make)(const GpuTransportOptions& options);
};

constexpr std::array kEntries = {
    Entry{"ipc", make_ipc_transport},
    Entry{
        "vmm",
        [](const auto& options) { return make_vmm_transport(options, VmmHandle::kDescriptor); }},
    Entry{
        "fabric",
        [](const auto& options) { return make_vmm_transport(options, VmmHandle::kFabric); }},
};

}  // namespace

std::vector<std::string> gpu_transport_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries) {
    names.emplace_back(entry.name);
  }
  return names;
}

std::unique_ptr<GpuTransport> make_gpu_transport(
    std::string_view name, const GpuTransportOptions& options
) {
  const auto* const found = std::ranges::find(kEntries, name, &Entry::name);
  WEFT_CHECK_ARG(
      options.context,
      found != kEntries.end(),
      "open: there is no GPU transport \"{}\" (WEFT_GPU_TRANSPORT; known: {})",
      name,
      fmt::join(gpu_transport_names(), ", ")
  );
  return found->make(options);
}

std::string gpu_transport_obstacle(std::string_view name, int device) {
  try {
    static_cast<void>(make_gpu_transport(
        name, {.device = device, .devices = {device}, .is_exported = true, .context = {}}
    ));
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace weft
