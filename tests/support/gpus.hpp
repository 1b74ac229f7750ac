// SPDX-License-Identifier: Apache-2.0
// The GPUs that tests use.
#pragma once

#include "core/gpu/devices.hpp"

namespace weft::test {

// Asked once. Touches CUDA: not in a process that forks ranks. Before that it
// sees to it that streams of many ranks on one GPU do not wait for each other.
[[nodiscard]] const GpuList& gpus_here();
void set_many_connections();

}  // namespace weft::test
