// SPDX-License-Identifier: Apache-2.0
// The GPU's half of device_memory.hpp: gpu_memory_cuda.cpp or gpu_memory_none.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace weft {

[[nodiscard]] std::shared_ptr<std::byte> allocate_on_gpu(int gpu, uint64_t bytes);
// Either pointer may be the host's; done on return.
void copy_by_gpu(int gpu, std::byte* to, const std::byte* from, uint64_t bytes);

}  // namespace weft
