// SPDX-License-Identifier: Apache-2.0
// How the host's memory is split.
#pragma once

namespace weft {

// NUMA nodes of this host; 1 where the system does not say.
[[nodiscard]] int num_memory_nodes();

}  // namespace weft
