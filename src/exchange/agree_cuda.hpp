// SPDX-License-Identifier: Apache-2.0
// What the ranks of a domain of GPUs settle when an exchange is made.
#pragma once

#include <cstdint>

#include "core/context.hpp"
#include "weft/group.hpp"

namespace weft {

struct DomainFacts {
  uint64_t stamp = 0;         // the same on all ranks, and of no other exchange
  uint64_t shared_bytes = 0;  // that a block may have on each of the GPUs
};

// Collective. `id` is the exchange's number in this process. Throws Error (kCuda).
[[nodiscard]] DomainFacts agree_on_facts(
    const Group& group, uint64_t id, int gpu, const Context& context
);

}  // namespace weft
