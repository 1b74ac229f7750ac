// SPDX-License-Identifier: Apache-2.0
// How ranks swap small blocks during set-up. Implementations: threads (local), TCP, the caller's
// own function.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "weft/group.hpp"

namespace weft {

class ControlPlane {
 public:
  virtual ~ControlPlane() = default;

  // Collective, one caller per rank at a time. Returns the blocks by rank. Throws TimeoutError
  // naming the ranks that did not call, PeerError for a rank that closed its side.
  virtual std::vector<Bytes> all_gather(std::span<const std::byte> block) = 0;
};

// Collective: measures the topology.
[[nodiscard]] Group make_group(int rank, int num_ranks, std::unique_ptr<ControlPlane> control);

// The ranks `members` (ascending, the caller's among them) as a group of one domain, numbered from
// 0. It speaks through `group`, so every rank of that makes a part of its own at the same time, and
// all make the same calls on it.
[[nodiscard]] Group part_of(const Group& group, const std::vector<int>& members);

}  // namespace weft
