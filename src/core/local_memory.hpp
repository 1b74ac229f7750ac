// SPDX-License-Identifier: Apache-2.0
// Table by which threads of a process find each other's memory by number. Memory lives until its
// last user is gone, and a number from elsewhere is an error, not a wild pointer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace weft {

class LocalMemory {
 public:
  uint64_t add(const std::shared_ptr<void>& memory) {
    const std::lock_guard lock(mutex_);
    std::erase_if(memories_, [](const auto& entry) { return entry.second.expired(); });
    memories_[++last_id_] = memory;
    return last_id_;
  }
  // Returns the memory; null if its last user is gone.
  [[nodiscard]] std::shared_ptr<void> find(uint64_t id) {
    const std::lock_guard lock(mutex_);
    const auto found = memories_.find(id);
    return found == memories_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<void>> memories_;
  uint64_t last_id_ = 0;
};

// Returns the table of this process.
inline LocalMemory& local_memory() {
  static auto& instance = *new LocalMemory;  // never destroyed: memory may outlive static objects
  return instance;
}

}  // namespace weft
