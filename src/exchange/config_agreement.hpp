// SPDX-License-Identifier: Apache-2.0
// An ExchangeConfig that is wrong or different on one rank is an error on all.
#pragma once

#include "core/check.hpp"
#include "weft/exchange.hpp"

namespace weft {

// Collective. Throws Error (kInvalidArgument) on every rank.
void agree_on_config(const Group& group, const ExchangeConfig& config, const Context& context);

}  // namespace weft
