// SPDX-License-Identifier: Apache-2.0
// Memory of ranks that are threads of one process: a peer's pointer is used as it is.
#pragma once

#include <memory>

#include "transport/mapped/memory.hpp"

namespace weft {

[[nodiscard]] std::unique_ptr<MemorySource> make_loopback_memory();

}  // namespace weft
