// SPDX-License-Identifier: Apache-2.0
// Transport ofi in builds without libfabric's headers.
#include "core/check.hpp"
#include "transport/ofi/ofi.hpp"

namespace weft {
namespace {

constexpr const char* kReason =
    "this build leaves it out, because libfabric's headers were missing (package libfabric-dev)";

[[noreturn]] void refuse(const Group& group, std::string_view transport) {
  WEFT_RAISE(
      (Context{.rank = group.rank(), .num_ranks = group.num_ranks(), .transport = transport}),
      ErrorCode::kNotAvailable,
      "open({}): {}",
      transport,
      kReason
  );
}

}  // namespace

std::string ofi_obstacle(const Group& /*group*/, std::string_view /*kind*/) {
  return kReason;
}

std::unique_ptr<Transport> make_ofi(
    const Group& group,
    uint32_t /*num_signals*/,
    const TransportOptions& /*options*/,
    std::string_view /*kind*/
) {
  refuse(group, "ofi");
}

std::unique_ptr<Transport> make_domains(
    const Group& group,
    uint32_t /*num_signals*/,
    const TransportOptions& /*options*/,
    std::string_view /*kind*/
) {
  refuse(group, "domains");
}

FabricReport fabric_report() {
  FabricReport report;
  report.library = kReason;
  return report;
}

}  // namespace weft
