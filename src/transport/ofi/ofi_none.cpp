// SPDX-License-Identifier: Apache-2.0
// Transport ofi in builds without libfabric's headers.
#include "core/check.hpp"
#include "transport/ofi/ofi.hpp"

namespace weft {
namespace {

constexpr const char* kReason =
    "this build leaves it out, because libfabric's headers were missing (package libfabric-dev)";

}  // namespace

std::string ofi_obstacle(const Group& /*group*/, std::string_view /*kind*/) {
  return kReason;
}

std::unique_ptr<Transport> make_ofi(
    const Group& group,
    uint32_t /*num_signals*/,
    std::chrono::milliseconds /*timeout*/,
    std::string_view /*kind*/
) {
  raise_error(
      ErrorCode::kNotAvailable,
      {.rank = group.rank(), .num_ranks = group.num_ranks(), .transport = "ofi"},
      fmt::format("open(ofi): {}", kReason)
  );
}

FabricReport fabric_report() {
  FabricReport report;
  report.library = kReason;
  return report;
}

}  // namespace weft
