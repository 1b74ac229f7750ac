// SPDX-License-Identifier: Apache-2.0
#include "transport/mapped/memory.hpp"

#include <bit>
#include <unistd.h>
#include <utility>

#include "core/check.hpp"
#include "core/local_memory.hpp"
#include "group/shared_memory.hpp"

namespace weft {
namespace {

class LoopbackMemory final : public MemorySource {
 public:
  [[nodiscard]] std::string_view name() const override { return "loopback"; }

  [[nodiscard]] Memory allocate(uint64_t bytes) override {
    Pages pages = map_pages(-1, bytes, ErrorCode::kOutOfMemory);
    std::byte* const data = pages.get();
    static_cast<void>(populate_pages(data, bytes));
    const std::shared_ptr<void> owner = std::move(pages);
    return {
        .data = data,
        .bytes = bytes,
        .cookie = {local_memory().add(owner), static_cast<uint64_t>(::getpid())},
        .owner = owner};
  }

  using MemorySource::reach;
  [[nodiscard]] Memory reach(
      const Cookie& cookie, uint64_t bytes, bool /*is_handed_on*/
  ) override {
    const bool is_here = cookie[1] == static_cast<uint64_t>(::getpid());
    std::shared_ptr<void> owner = is_here ? local_memory().find(cookie[0]) : nullptr;
    const auto* const pages = std::get_deleter<UnmapPages>(owner);
    WEFT_CHECK(
        Context{},
        pages != nullptr && pages->bytes >= bytes,
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

// Holds a SharedMemoryRef but for its size, which peers know.
struct RefBits {
  uint64_t inode = 0;
  int32_t pid = 0;
  int32_t fd = -1;
};
static_assert(sizeof(RefBits) == sizeof(Cookie));

class ShmMemory final : public MemorySource {
 public:
  [[nodiscard]] std::string_view name() const override { return "shm"; }

  [[nodiscard]] Memory allocate(uint64_t bytes) override {
    return hold(SharedMemory::create(bytes));
  }

  using MemorySource::reach;
  [[nodiscard]] Memory reach(const Cookie& cookie, uint64_t bytes, bool is_handed_on) override {
    const auto [inode, pid, fd] = std::bit_cast<RefBits>(cookie);
    return hold(
        SharedMemory::open({.bytes = bytes, .inode = inode, .pid = pid, .fd = fd}, is_handed_on)
    );
  }

 private:
  static Memory hold(SharedMemory memory) {
    auto owner = std::make_shared<SharedMemory>(std::move(memory));
    const SharedMemoryRef& ref = owner->ref();
    return {
        .data = owner->data(),
        .bytes = owner->bytes(),
        .cookie = std::bit_cast<Cookie>(RefBits{.inode = ref.inode, .pid = ref.pid, .fd = ref.fd}),
        .owner = owner};
  }
};

}  // namespace

std::unique_ptr<MemorySource> make_loopback_memory() {
  return std::make_unique<LoopbackMemory>();
}

std::unique_ptr<MemorySource> make_shm_memory() {
  return std::make_unique<ShmMemory>();
}

}  // namespace weft
