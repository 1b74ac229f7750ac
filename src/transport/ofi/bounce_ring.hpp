// SPDX-License-Identifier: Apache-2.0
// Room for copies of what is being sent, handed out in order and given back in any order. One
// thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

namespace weft::ofi {

class BounceRing {
 public:
  struct Block {
    uint64_t ticket = 0;  // for give_back()
    uint64_t offset = 0;
  };

  explicit BounceRing(uint64_t bytes) : bytes_(bytes) {}
  [[nodiscard]] uint64_t bytes() const { return bytes_; }

  // `bytes` in one piece, at a multiple of 64; empty: not now. At most bytes() fit at all.
  [[nodiscard]] std::optional<Block> take(uint64_t bytes);
  void give_back(uint64_t ticket);

 private:
  struct Span {
    uint64_t begin = 0;
    uint64_t end = 0;
    bool is_free = false;
  };
  [[nodiscard]] std::optional<uint64_t> find(uint64_t bytes) const;

  uint64_t bytes_;
  std::deque<Span> taken_;     // oldest first
  uint64_t first_ticket_ = 0;  // of taken_.front()
};

}  // namespace weft::ofi
