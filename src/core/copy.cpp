// SPDX-License-Identifier: Apache-2.0
#include "core/copy.hpp"

#include <hwy/cache_control.h>

#include <cstring>

namespace weft {

void copy_bytes(void* to, const void* from, uint64_t bytes) {
  if (bytes != 0) {
    std::memcpy(to, from, bytes);
  }
}

void copy_streaming(void* to, const void* from, uint64_t bytes) {
  copy_bytes(to, from, bytes);
}

void streaming_fence() {
  hwy::FlushStream();
}

}  // namespace weft
