// SPDX-License-Identifier: Apache-2.0
// Finds the provider that all ranks can use.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "transport/ofi/fabric.hpp"
#include "transport/ofi/providers.hpp"
#include "weft/group.hpp"

namespace weft::ofi {

// What `kind`, else the environment asks for, for these ranks.
[[nodiscard]] FabricWish wish_for(
    const Group& group, std::string_view kind, std::string_view device = {}
);

struct Selection {
  const Provider* provider = nullptr;
  Info info;
  std::string gpu_obstacle;  // why memory of GPUs is not asked for; this rank's
  uint32_t num_queues = 1;   // the fewest that any rank asks for or can have
};

// Collective. `device`: PCI address of this rank's GPU, or empty. Throws the same Error
// (kNotAvailable) on every rank, with what each provider lacks and where.
[[nodiscard]] Selection select_provider(
    const Group& group, std::string_view kind, std::string_view device = {}
);

// Why no provider can be used, as far as this rank can tell; empty: one can.
[[nodiscard]] std::string obstacle_here(const FabricWish& wish);

}  // namespace weft::ofi
