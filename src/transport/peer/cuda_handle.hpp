// SPDX-License-Identifier: Apache-2.0
// One region of GPU memory: made, named to other processes, and mapped from one.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "core/context.hpp"
#include "transport/peer/region_source.hpp"

namespace weft {

// On the current device; contents undefined. With `is_exported` other processes can map it. Throws
// Error (kOutOfMemory, kCuda).
[[nodiscard]] OwnRegion make_cuda_region(uint64_t bytes, bool is_exported, const Context& context);
// Of this process, by the id in the handle; null if it is gone.
[[nodiscard]] std::shared_ptr<std::byte> find_cuda_region(const RegionHandle& handle);
// Of another process, on the current device. Throws Error (kNotAvailable).
[[nodiscard]] std::shared_ptr<std::byte> open_cuda_region(
    const RegionHandle& handle, int owner, const Context& context
);

}  // namespace weft
