// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/shm.hpp"

#include <bit>
#include <utility>

#include "group/shared_memory.hpp"

namespace weft {
namespace {

// A SharedMemoryRef but for its size, which peers know.
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

  [[nodiscard]] Memory reach(const Cookie& cookie, uint64_t bytes) override {
    const auto [inode, pid, fd] = std::bit_cast<RefBits>(cookie);
    return hold(SharedMemory::open({.bytes = bytes, .inode = inode, .pid = pid, .fd = fd}));
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

std::unique_ptr<MemorySource> make_shm_memory() {
  return std::make_unique<ShmMemory>();
}

}  // namespace weft
