// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process meet at a shared table.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "group/control_plane.hpp"

namespace weft {

// One per rank. A rank whose control plane is destroyed has left.
[[nodiscard]] std::vector<std::unique_ptr<ControlPlane>> make_local_control(
    int num_ranks, std::chrono::milliseconds timeout
);

}  // namespace weft
