// SPDX-License-Identifier: Apache-2.0
#include "core/memory_nodes.hpp"

#include <algorithm>
#include <filesystem>
#include <string>

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

}  // namespace weft
