// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/gpu/check.hpp"
#include "cuda/layout/control.hpp"

namespace weft::test {

// Runs the kernel of barrier_cuda.cu to its end.
void launch_wait_alone(const RankView& me, int* has_come);

}  // namespace weft::test
