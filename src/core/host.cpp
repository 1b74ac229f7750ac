// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <sched.h>
#include <string>

#include "core/host_map.hpp"

namespace weft {

int num_memory_nodes() {
  const auto is_node = [](const std::filesystem::directory_entry& entry) {
    const std::string name = entry.path().filename();
    return name.starts_with("node") && name.size() > 4 && name[4] >= '0' && name[4] <= '9';
  };
  std::error_code ignored;
  std::filesystem::directory_iterator entries("/sys/devices/system/node", ignored);
  const auto count = std::count_if(begin(entries), end(entries), is_node);
  return std::max(1, static_cast<int>(count));
}

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
