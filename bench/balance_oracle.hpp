// SPDX-License-Identifier: Apache-2.0
// The slow truth about balancing: how even could the ranks be at best?
#pragma once

#include <cstdint>

#include "plan/balance/balance.hpp"

namespace weft {

// The least number of rows that the busiest rank can have with the experts lying where they do,
// whatever each place gets. By maximum flow; see balance_oracle.cpp.
[[nodiscard]] int64_t least_busiest(const Placement& placement);

}  // namespace weft
