// SPDX-License-Identifier: Apache-2.0
// Functions that only the driver has. They are looked up through the runtime, so that a program
// also starts where no driver is.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/context.hpp"

namespace weft {

// Returns the driver's function of this name; null if there is none.
[[nodiscard]] void* driver_function(const char* name);

// When a stream sees what a network card has written into the GPU's memory and the host knows of.
enum class RemoteWrites : uint8_t {
  kInOrder,     // at once
  kAfterFlush,  // behind a wait_for_word() that flushes
  kUnknown,     // nothing helps
};
[[nodiscard]] RemoteWrites remote_writes_of(int device, const Context& context);

// Makes what follows in `stream` wait until *word, in pinned host memory, is at `value` or up to
// 2^31 beyond it, counting round, and see what `writes` of network cards came before. No
// multiprocessor waits; the word must be written in any case. Throws Error (kCuda).
void wait_for_word(
    cudaStream_t stream,
    const uint32_t* word,
    uint32_t value,
    RemoteWrites writes,
    const Context& context
);

// Sets *word, in memory that this GPU reaches, to `value` once all work before in `stream` is done;
// who sees that sees what the work has written. No multiprocessor writes. Throws Error (kCuda).
void write_word(cudaStream_t stream, uint32_t* word, uint32_t value, const Context& context);

}  // namespace weft

// WEFT_DRIVER(cuMemCreate)(arguments): a function that <cuda.h> declares, looked up once because
// that takes longer than most calls. Answers as the runtime does, whose numbers of errors are the
// driver's, so that it can stand in a WEFT_CUDA.
#define WEFT_DRIVER(name)                                                          \
  [](auto... arguments) {                                                          \
    static auto* const function =                                                  \
        reinterpret_cast<decltype(&(name))>(::weft::driver_function(#name));       \
    return function == nullptr ? cudaErrorSymbolNotFound                           \
                               : static_cast<cudaError_t>(function(arguments...)); \
  }
