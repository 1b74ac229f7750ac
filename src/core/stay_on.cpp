// SPDX-License-Identifier: Apache-2.0
#include <sched.h>

#include "core/host_map.hpp"

namespace weft {

void stay_on(std::span<const int> cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) {
    if (core < CPU_SETSIZE) {
      CPU_SET(static_cast<size_t>(core), &set);
    }
  }
  if (CPU_COUNT(&set) > 0) {
    static_cast<void>(::sched_setaffinity(0, sizeof set, &set));  // 0: this thread
  }
}

}  // namespace weft
