// SPDX-License-Identifier: Apache-2.0
#include "cuda/exchange/refusal_board.hpp"

#include <array>
#include <atomic>
#include <bit>

#include "group/agree.hpp"
#include "group/control_plane.hpp"

namespace weft {
namespace {

constexpr uint32_t kEntries = 8;
constexpr size_t kWords = sizeof(Refusal) / sizeof(uint64_t);
constexpr uint64_t kIsThere = uint64_t{1} << 32;  // no number of a call has that bit

}  // namespace

// Memory that is all zero is an empty entry. `stamp` names the text's call and is 0 while the text
// changes.
struct RefusalBoard::Entry {
  std::atomic<uint64_t> stamp;
  std::array<std::atomic<uint64_t>, kWords> words;
};

RefusalBoard::RefusalBoard(const Group& group) : rank_(group.rank()) {
  SharedMemory own;
  agree(group, [&] {
    own = SharedMemory::create(kEntries * sizeof(Entry) + sizeof(std::atomic<uint64_t>));
  });
  const std::vector<SharedMemoryRef> refs = gather_values(group, own.ref());
  agree(group, [&] {
    for (const SharedMemoryRef& ref : refs) {
      memories_.push_back(SharedMemory::open(ref));
    }
  });
}

RefusalBoard::Entry& RefusalBoard::entry(int rank, uint32_t call) const {
  std::byte* const data = memories_[static_cast<size_t>(rank)].data();
  return reinterpret_cast<Entry*>(data)[call % kEntries];
}

void RefusalBoard::post(uint32_t call, const Refusal& reason) const {
  const auto words = std::bit_cast<std::array<uint64_t, kWords>>(reason);
  Entry& own = entry(rank_, call);
  own.stamp.store(0, std::memory_order_relaxed);
  for (size_t i = 0; i < kWords; ++i) {
    own.words[i].store(words[i], std::memory_order_release);
  }
  own.stamp.store(kIsThere | call, std::memory_order_release);
}

std::optional<Refusal> RefusalBoard::reason(int rank, uint32_t call) const {
  const Entry& said = entry(rank, call);
  if (said.stamp.load(std::memory_order_acquire) != (kIsThere | call)) {
    return std::nullopt;
  }
  std::array<uint64_t, kWords> words;
  for (size_t i = 0; i < kWords; ++i) {
    words[i] = said.words[i].load(std::memory_order_acquire);
  }
  if (said.stamp.load(std::memory_order_relaxed) != (kIsThere | call)) {
    return std::nullopt;
  }
  return std::bit_cast<Refusal>(words);
}

std::atomic<uint64_t>& RefusalBoard::interrupt_of(int rank) const {
  std::byte* const data = memories_[static_cast<size_t>(rank)].data();
  return *reinterpret_cast<std::atomic<uint64_t>*>(data + kEntries * sizeof(Entry));
}

void RefusalBoard::interrupt(uint32_t call) const {
  interrupt_of(rank_).store(kIsThere | call, std::memory_order_release);
}

std::optional<uint32_t> RefusalBoard::interrupted(int rank) const {
  const uint64_t word = interrupt_of(rank).load(std::memory_order_acquire);
  return word == 0 ? std::nullopt : std::optional(static_cast<uint32_t>(word));
}

}  // namespace weft
