// SPDX-License-Identifier: Apache-2.0
// Counts of messages that have come over the network, in memory where the GPU looks: copies of
// messages are queued before these have come, and go on as the counts do. The caller says how many
// are expected, a thread that receives them counts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace weft {

class MessageCounts {
 public:
  // One count for each place, from 0; they go on from call to call, beyond 2^32 from 0 again.
  explicit MessageCounts(std::span<uint32_t> counts) : counts_(counts), expected_(counts.size()) {}

  // The caller: `count` more. -> what the count is before them.
  uint32_t expect(size_t place, int64_t count) {
    const uint32_t before = expected_[place];
    expected_[place] += static_cast<uint32_t>(count);
    return before;
  }
  // The receiver: it is so much now, and the messages can be read, or will never come.
  void set(size_t place, uint32_t count) {
    std::atomic_ref(counts_[place]).store(count, std::memory_order_release);
  }
  // Any thread: whether it is at `count` or beyond.
  [[nodiscard]] bool has_reached(size_t place, uint32_t count) const {
    const uint32_t now = std::atomic_ref(counts_[place]).load(std::memory_order_acquire);
    return static_cast<int32_t>(now - count) >= 0;
  }
  // The word that the GPU waits for.
  [[nodiscard]] const uint32_t* word(size_t place) const { return &counts_[place]; }

 private:
  std::span<uint32_t> counts_;
  std::vector<uint32_t> expected_;
};

}  // namespace weft
