// SPDX-License-Identifier: Apache-2.0
// Which GPUs there are, asked in a child process: a process that has used CUDA must not fork ranks
// that use it.
#pragma once

#include "core/devices.hpp"

namespace weft {

// What list_gpus() says, without CUDA being touched in this process. Call it before starting
// threads. At most 30 s; `none_reason` says what went wrong.
[[nodiscard]] GpuList probe_gpus();

}  // namespace weft
