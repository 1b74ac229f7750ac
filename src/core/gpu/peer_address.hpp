// SPDX-License-Identifier: Apache-2.0
// How ranks of a domain name device memory to each other: every rank keeps a table of all regions
// of all ranks as its own GPU maps them.
#pragma once

#include <cstdint>

namespace weft {

inline constexpr int kMaxDomainRanks = 32;
// Region 0 of every rank is its control region.
inline constexpr uint32_t kMaxPeerRegions = 256;

// Memory of some rank, wherever each peer maps it.
struct PeerAddress {
  uint32_t region = 0;  // 0: none
  uint32_t padding = 0;
  uint64_t offset = 0;
};

}  // namespace weft
