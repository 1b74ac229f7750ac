// SPDX-License-Identifier: Apache-2.0
// Memory that processes of one host share; threads of one process work alike.
#pragma once

#include <memory>

#include "transport/mapped/memory.hpp"

namespace weft {

[[nodiscard]] std::unique_ptr<MemorySource> make_shm_memory();

}  // namespace weft
