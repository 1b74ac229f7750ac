// SPDX-License-Identifier: Apache-2.0
#include "transport/loopback/loopback.hpp"

#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

#include "core/check.hpp"
#include "group/map_pages.hpp"

namespace weft {
namespace {

// Where threads find each other's memory by number, so that it lives until its last user is gone
// and a number from elsewhere is an error, not a wild pointer.
class Board {
 public:
  uint64_t publish(std::weak_ptr<void> memory) {
    const std::lock_guard lock(mutex_);
    memories_[++last_id_] = std::move(memory);
    return last_id_;
  }
  void withdraw(uint64_t id) {
    const std::lock_guard lock(mutex_);
    memories_.erase(id);
  }
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

Board& board() {
  static auto& instance = *new Board;  // never destroyed: memory may outlive static objects
  return instance;
}

class LoopbackMemory final : public MemorySource {
 public:
  [[nodiscard]] std::string_view name() const override { return "loopback"; }

  [[nodiscard]] Memory allocate(uint64_t bytes) override {
    std::byte* const data = map_pages(-1, bytes, ErrorCode::kOutOfMemory);
    static_cast<void>(populate_pages(data, bytes));
    auto id = std::make_shared<uint64_t>(0);
    const std::shared_ptr<void> owner(data, [bytes, id](void* address) {
      board().withdraw(*id);
      ::munmap(address, bytes);
    });
    *id = board().publish(owner);
    return {
        .data = data,
        .bytes = bytes,
        .cookie = {*id, static_cast<uint64_t>(::getpid())},
        .owner = owner};
  }

  [[nodiscard]] Memory reach(const Cookie& cookie, uint64_t bytes) override {
    const bool is_here = cookie[1] == static_cast<uint64_t>(::getpid());
    std::shared_ptr<void> owner = is_here ? board().find(cookie[0]) : nullptr;
    WEFT_CHECK(
        Context{},
        owner != nullptr,
        ErrorCode::kNotAvailable,
        "map: memory {} of process {} is not in this process ({})",
        cookie[0],
        cookie[1],
        ::getpid()
    );
    auto* data = static_cast<std::byte*>(owner.get());
    return {.data = data, .bytes = bytes, .cookie = cookie, .owner = std::move(owner)};
  }
};

}  // namespace

std::unique_ptr<MemorySource> make_loopback_memory() {
  return std::make_unique<LoopbackMemory>();
}

}  // namespace weft
