// SPDX-License-Identifier: Apache-2.0
// Whether a schedule is safe whatever the speed of its lanes.
#pragma once

#include "overlap/schedule.hpp"

namespace weft::overlap {

// Throws Error (kInvalidArgument), naming step and value, if a value may be read before it is
// written, read or written after it is freed, or written or freed twice. Only lanes and waits
// count, not the order of issue.
void check_schedule(const Schedule& schedule);

}  // namespace weft::overlap
