// SPDX-License-Identifier: Apache-2.0
// Transport ofi in builds without libfabric's headers.
#include "core/check.hpp"
#include "transport/ofi/ofi.hpp"

namespace weft {

std::string ofi_obstacle(const Group& /*group*/, std::string_view /*kind*/) {
  return fabric_report().library;
}

// Never called: the obstacle is known.
std::unique_ptr<Transport> make_ofi(
    const Group&, uint32_t, const TransportOptions&, std::string_view
) {
  return nullptr;
}

std::unique_ptr<Transport> make_domains(
    const Group&, uint32_t, const TransportOptions&, std::string_view
) {
  return nullptr;
}

FabricReport fabric_report() {
  FabricReport report;
  report.library =
      "this build leaves it out, because libfabric's headers were missing (package libfabric-dev)";
  return report;
}

}  // namespace weft
