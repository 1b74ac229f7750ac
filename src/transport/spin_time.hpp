// SPDX-License-Identifier: Apache-2.0
// How long a waiting rank looks around before it sleeps.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "weft/group.hpp"

namespace weft {

// A wake-up through the kernel costs tens of microseconds, so a rank with a core of its own looks
// around a while first; where ranks share cores, spinning keeps the awaited peer from running.
[[nodiscard]] inline std::chrono::nanoseconds spin_time(const Group& group) {
  const auto& hosts = group.topology().host_of;
  const auto rank = static_cast<size_t>(group.rank());
  const auto on_host = std::count(hosts.begin(), hosts.end(), hosts[rank]);
  const bool is_alone = on_host <= static_cast<int64_t>(std::thread::hardware_concurrency());
  return is_alone ? std::chrono::microseconds(20) : std::chrono::microseconds(1);
}

}  // namespace weft
