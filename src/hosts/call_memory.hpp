// SPDX-License-Identifier: Apache-2.0
// Layout of all memory of a call between domains of GPUs: offsets into the network's staging, into
// the messages that the GPU packs, and into the GPU memory that calls work in; and how much all of
// them may need. Previous: the plan's DomainTraffic; next: dispatch.cpp and combine.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "call/chunks.hpp"
#include "cpu/protocol/region_map.hpp"
#include "hosts/message_format.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

// Offsets of areas in some memory, taken one after the other.
class AreaMap {
 public:
  static constexpr uint64_t kAlignment = 256;

  explicit AreaMap(uint64_t first = 0, uint64_t alignment = kAlignment)
      : alignment_(alignment), num_bytes_(align_up(first, alignment)) {}

  // Returns the offset of the next area.
  uint64_t add(uint64_t bytes) {
    const uint64_t offset = num_bytes_;
    num_bytes_ = align_up(offset + bytes, alignment_);
    return offset;
  }
  [[nodiscard]] uint64_t num_bytes() const { return num_bytes_; }

 private:
  uint64_t alignment_;
  uint64_t num_bytes_;
};

// The bytes that one call needs, or the most that any may need.
struct CallRoom {
  uint64_t staging = 0;       // bytes that peers write
  uint64_t messages = 0;      // bytes that the GPU packs
  uint64_t work = 0;          // bytes in the GPU's memory
  uint64_t num_messages = 0;  // that the GPU packs

  [[nodiscard]] constexpr bool holds(const CallRoom& call) const {
    return call.staging <= staging && call.messages <= messages && call.work <= work &&
           call.num_messages <= num_messages;
  }
};

// Numbers that decide how much room calls need.
struct CallBounds {
  uint64_t num_others = 0;     // domains
  uint64_t num_forwarded = 0;  // sources that a rank forwards for
  int64_t max_tokens = 0;      // of each rank
  int max_topk = 0;
  int64_t token_bytes = 0;  // that cross with a token: there in a dispatch, both ways in a combine
};

// Returns room for any dispatch or combine. A token crosses to every other domain or to as many as
// it has experts, whichever is less; all tokens of a source may cross to its forwarder. Rows that
// go one way in dispatch come back in combine, so each area of the network's memory needs the
// larger of the two numbers.
[[nodiscard]] constexpr CallRoom room_of_calls(const CallBounds& bounds) {
  const auto tokens = static_cast<uint64_t>(std::max<int64_t>(bounds.max_tokens, 1));
  const auto bytes = tokens * static_cast<uint64_t>(bounds.token_bytes);
  const auto chunks = static_cast<uint64_t>(num_chunks(bounds.max_tokens)) + 1;
  const uint64_t crossed =
      std::min<uint64_t>(bounds.num_others, static_cast<uint64_t>(std::max(bounds.max_topk, 1)));
  const uint64_t peers = bounds.num_others + bounds.num_forwarded;
  const uint64_t gaps = (peers + 1) * (chunks * 64 + AreaMap::kAlignment);  // see stride()
  const uint64_t host = std::max(crossed, bounds.num_forwarded) * bytes + gaps;
  return {
      .staging = host,
      .messages = host,
      .work = (crossed + bounds.num_forwarded + 2) * bytes + 3 * (peers + 1) * AreaMap::kAlignment,
      .num_messages = peers * chunks};
}

// Offsets in GPU memory of the inter-node tokens of one source that this rank forwards for, or of
// their sums.
struct ForwardedArea {
  uint64_t rows = 0;
  uint64_t weights = 0;  // combine: gradients that go back
  uint64_t extra = 0;    // dispatch: scales; combine: source weights that came
};

// Area of the messages for a rank among those that the GPU packs.
struct MessageArea {
  uint64_t offset = 0;
  int64_t first = 0;  // number of the first message in its call
};

struct DispatchAreas {
  DispatchAreas() = default;
  // `tokens` is the format of inter-node tokens: a row, with weights and scales if any.
  DispatchAreas(const PlanData& plan, const MessageFormat& tokens);

  // Areas by source that this rank forwards for:
  std::vector<uint64_t> staged;  // in staging
  std::vector<ForwardedArea> forwarded;
  std::vector<MessageArea> messages;  // by domain, nothing for the own one
  uint64_t own_weights = 0;           // by k, in GPU memory
  CallRoom room;                      // all of it
};

// Areas of a combine.
struct CombineAreas {
  CombineAreas() = default;
  // `sums` is the format of inter-node tokens' sums: a row, and weight gradients if any; `weights`
  // that of the weights that go the other way before, if any.
  CombineAreas(const PlanData& plan, const MessageFormat& sums, const MessageFormat& weights);

  // Areas by source that this rank forwards for:
  std::vector<ForwardedArea> forwarded;
  std::vector<uint64_t> staged_weights;  // in staging
  std::vector<MessageArea> sum_messages;
  // Areas by domain, nothing for the own one:
  std::vector<int64_t> first_part;    // row among the parts
  std::vector<uint64_t> staged_sums;  // in staging
  std::vector<MessageArea> weight_messages;
  // Offsets in GPU memory: all parts (see InterNodeArrays), their weights, and this rank's own by
  // k.
  uint64_t parts = 0;
  uint64_t part_weights = 0;
  uint64_t own_weights = 0;
  CallRoom room;  // all of it
};

}  // namespace weft
