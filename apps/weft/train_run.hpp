// SPDX-License-Identifier: Apache-2.0
// One rank of `weft train`.
#pragma once

#include <cstddef>
#include <span>

#include "stop_request.hpp"
#include "train_options.hpp"
#include "weft/group.hpp"

namespace weft::program {

// Collective. Trains until a limit is reached or `stop` is set, then saves and, on rank 0, prints.
int train_on_rank(
    const Group& group,
    const TrainOptions& options,
    std::span<const std::byte> text,
    const StopRequest& stop
);

}  // namespace weft::program
