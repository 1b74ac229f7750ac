// SPDX-License-Identifier: Apache-2.0
// Memory of a CPU or a GPU by one interface, for the program, the benchmarks and the tests. Never
// waits for other streams of a GPU than the calling thread's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "weft/tensor.hpp"

namespace weft {

// At least 256-byte aligned on a GPU, 64 on a CPU; contents undefined. Throws Error (kOutOfMemory,
// kNotAvailable).
[[nodiscard]] std::shared_ptr<std::byte> allocate_on(const Device& device, uint64_t bytes);

// Returns when done. At least one side may be a CPU, or both the same GPU.
void copy_between(
    std::byte* to,
    const Device& to_device,
    const std::byte* from,
    const Device& from_device,
    uint64_t bytes
);

// The GPU's half: memory.cpp answers, or none.cpp in builds without CUDA.
[[nodiscard]] std::shared_ptr<std::byte> allocate_on_gpu(int gpu, uint64_t bytes);
// Either pointer may be the host's; done on return.
void copy_by_gpu(int gpu, std::byte* to, const std::byte* from, uint64_t bytes);

}  // namespace weft
