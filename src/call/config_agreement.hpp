// SPDX-License-Identifier: Apache-2.0
// An ExchangeConfig that is wrong or different on one rank is an error on all.
#pragma once

#include <functional>

#include "core/check.hpp"
#include "weft/exchange.hpp"

namespace weft {

// Collective. Throws Error on every rank: this rank's own, of whatever code, else kInvalidArgument.
// `more_checks` may throw what only the chosen executor knows.
void agree_on_config(
    const Group& group,
    const ExchangeConfig& config,
    const Context& context,
    const std::function<void()>& more_checks = {}
);

}  // namespace weft
