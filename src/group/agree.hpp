// SPDX-License-Identifier: Apache-2.0
// Set-up steps that may fail on one rank and must then fail on all, with one reason.
#pragma once

#include <functional>
#include <string_view>

#include "weft/group.hpp"

namespace weft {

// Collective. Runs `step`, then tells all ranks how it went; throws the error of the lowest rank
// that failed on every rank.
void agree(const Group& group, const std::function<void()>& step);
// Collective. Throws Error (kInvalidArgument) unless all ranks ask for the same transport: others
// would wait for each other in different places.
void agree_on_name(std::string_view name, const Group& group);

}  // namespace weft
