// SPDX-License-Identifier: Apache-2.0
#include "support/gpus.hpp"

#include <cstdlib>

namespace weft::test {

void set_many_connections() {
  // A GPU has 8 queues for all streams by default, and streams that share one may wait for each
  // other.
  static_cast<void>(::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0));
}

const GpuList& gpus_here() {
  static const GpuList list = [] {
    set_many_connections();
    return list_gpus();
  }();
  return list;
}

}  // namespace weft::test
