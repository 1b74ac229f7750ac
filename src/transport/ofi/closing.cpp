// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/closing.hpp"

#include <map>
#include <utility>

namespace weft::ofi {

std::shared_ptr<Closing> Closing::join(uint64_t session) {
  static std::mutex mutex;
  static std::map<uint64_t, std::weak_ptr<Closing>> sessions;
  const std::lock_guard lock(mutex);
  std::erase_if(sessions, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Closing>& entry = sessions[session];
  std::shared_ptr<Closing> closing = entry.lock();
  if (closing == nullptr) {
    closing = std::make_shared<Closing>();
    entry = closing;
  }
  return closing;
}

void Closing::keep(std::vector<std::unique_ptr<Queue>> queues) {
  const std::lock_guard lock(mutex_);
  for (auto& queue : queues) {
    queues_.push_back(std::move(queue));
  }
}

}  // namespace weft::ofi
