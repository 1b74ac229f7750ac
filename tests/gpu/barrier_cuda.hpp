// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/gpu/check.hpp"
#include "cuda/layout/control.hpp"

namespace weft::test {

// Queues a kernel that waits until numbers[0] is set, in pinned memory, and one more behind it. It
// gives up after two seconds and sets numbers[1].
void launch_wait_for_host(int* numbers, cudaStream_t stream);

// Runs a warp that waits in shared memory to its end.
void launch_wait_alone(const RankView& me, int* has_come);

}  // namespace weft::test
