// SPDX-License-Identifier: Apache-2.0
// Copies of some bytes between the host and a GPU, through pinned memory of the process. A copy
// from or to any other memory of the host may have to wait for a copy of another thread, such as a
// caller's read of a result: that waits for a kernel, which may wait for what the first one brings.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/context.hpp"

namespace weft {

inline constexpr size_t kShortCopyBytes = 4096;  // at most; a page

// Takes the pinned memory, which must not happen while kernels wait. Throws Error kCuda.
void reserve_short_copies();

// These return when the copy has been made. They throw Error kCuda.
void read_short(
    void* to, const void* from, size_t bytes, cudaStream_t stream, const Context& context
);
void write_short(
    void* to, const void* from, size_t bytes, cudaStream_t stream, const Context& context
);

}  // namespace weft
