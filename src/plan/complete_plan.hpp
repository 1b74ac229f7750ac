// SPDX-License-Identifier: Apache-2.0
// Parts of a plan that follow from its arrivals.
#pragma once

#include "plan/plan_data.hpp"

namespace weft {

// token_begin and token_arrivals from `sent`.
void link_tokens(PlanData& plan);

}  // namespace weft
