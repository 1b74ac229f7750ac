// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/bounce_ring.hpp"

#include "core/check.hpp"

namespace weft::ofi {

// Behind the newest span, else, once the newest is behind the oldest, from the start again.
std::optional<uint64_t> BounceRing::find(uint64_t bytes) const {
  if (taken_.empty()) {
    return bytes <= bytes_ ? std::optional<uint64_t>(0) : std::nullopt;
  }
  const uint64_t oldest = taken_.front().begin;
  const uint64_t end = taken_.back().end;
  const bool has_wrapped = taken_.back().begin < oldest;
  if (has_wrapped) {
    return bytes <= oldest - end ? std::optional(end) : std::nullopt;
  }
  if (bytes <= bytes_ - end) {
    return end;
  }
  return bytes <= oldest ? std::optional<uint64_t>(0) : std::nullopt;
}

std::optional<BounceRing::Block> BounceRing::take(uint64_t bytes) {
  const uint64_t rounded = (bytes + 63) / 64 * 64;
  const auto offset = find(rounded);
  if (!offset) {
    return std::nullopt;
  }
  taken_.push_back({.begin = *offset, .end = *offset + rounded});
  return Block{.ticket = first_ticket_ + taken_.size() - 1, .offset = *offset};
}

void BounceRing::give_back(uint64_t ticket) {
  WEFT_ASSERT(ticket >= first_ticket_ && ticket - first_ticket_ < taken_.size());
  taken_[ticket - first_ticket_].is_free = true;
  while (!taken_.empty() && taken_.front().is_free) {
    taken_.pop_front();
    ++first_ticket_;
  }
}

}  // namespace weft::ofi
