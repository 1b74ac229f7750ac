// SPDX-License-Identifier: Apache-2.0
// The routing of a simulated group: made up on all cores, or real.
#pragma once

#include <functional>
#include <vector>

#include "plan/build.hpp"
#include "simulate_options.hpp"

namespace weft::program {

// `told` hears the share that is done, on the calling thread.
[[nodiscard]] std::vector<RouteTable> make_up_tables(
    const MadeUpRouting& spec, const std::function<void(double)>& told
);

}  // namespace weft::program
