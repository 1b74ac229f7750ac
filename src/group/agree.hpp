// SPDX-License-Identifier: Apache-2.0
// Set-up steps that may fail on one rank and must then fail on all, with one reason.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string_view>

#include "core/context.hpp"
#include "weft/group.hpp"

namespace weft {

// Runs `step`. Returns how that went, for the other ranks: empty if well.
[[nodiscard]] Bytes outcome_of(const std::function<void()>& step);
// Throws the error that `outcome`, which `rank` has sent, holds; nothing if it is empty.
void check_outcome(std::span<const std::byte> outcome, size_t rank, const Context& context);
// Collective. Runs `step`, then tells all ranks how it went; throws the error of the lowest rank
// that failed on every rank.
void agree(const Group& group, const std::function<void()>& step);
// Collective. Throws Error (kInvalidArgument) unless all ranks ask for the same transport: they
// would wait for each other in different places.
void agree_on_name(std::string_view name, const Group& group);

}  // namespace weft
