// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/shm.hpp"

#include <bit>
#include <utility>

#include "group/shared_memory.hpp"

namespace weft {
namespace {

static_assert(sizeof(SharedMemoryRef) <= sizeof(Cookie));

struct RefBits {
  SharedMemoryRef ref;
  uint64_t unused = 0;
};

class ShmMemory final : public MemorySource {
 public:
  [[nodiscard]] std::string_view name() const override { return "shm"; }

  [[nodiscard]] Memory allocate(uint64_t bytes) override {
    return hold(SharedMemory::create(bytes));
  }

  [[nodiscard]] Memory reach(const Cookie& cookie, uint64_t /*bytes*/) override {
    return hold(SharedMemory::open(std::bit_cast<RefBits>(cookie).ref));
  }

 private:
  static Memory hold(SharedMemory memory) {
    auto owner = std::make_shared<SharedMemory>(std::move(memory));
    return {
        .data = owner->data(),
        .bytes = owner->bytes(),
        .cookie = std::bit_cast<Cookie>(RefBits{.ref = owner->ref()}),
        .owner = owner};
  }
};

}  // namespace

std::unique_ptr<MemorySource> make_shm_memory() {
  return std::make_unique<ShmMemory>();
}

}  // namespace weft
