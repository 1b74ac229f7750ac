// SPDX-License-Identifier: Apache-2.0
// Memory of a CPU or a GPU by one interface, for the program, the benchmarks and the tests. Never
// waits for other streams of a GPU than the calling thread's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "weft/tensor.hpp"

namespace weft {

// Returns memory, at least 256-byte aligned on a GPU, 64 on a CPU; contents undefined. Throws Error
// (kOutOfMemory, kNotAvailable).
[[nodiscard]] std::shared_ptr<std::byte> allocate_on(const Device& device, uint64_t bytes);

// Returns when done. At least one side is a CPU, or both are the same GPU.
void copy_between(
    std::byte* to,
    const Device& to_device,
    const std::byte* from,
    const Device& from_device,
    uint64_t bytes
);

// Allocates for allocate_on(): in memory.cpp, or none.cpp in builds without CUDA.
[[nodiscard]] std::shared_ptr<std::byte> allocate_on_gpu(int gpu, uint64_t bytes);
// Copies; either pointer may be the host's. Done on return.
void copy_by_gpu(int gpu, std::byte* to, const std::byte* from, uint64_t bytes);

}  // namespace weft
