// SPDX-License-Identifier: Apache-2.0
#include "transport/peer/board.hpp"

#include <new>

namespace weft {

void Board::clear(int num_ranks) const {
  new (data_) BoardHead;
  for (uint32_t region = 0; region < kMaxPeerRegions; ++region) {
    new (&entry(region)) BoardEntry;
    for (int rank = 0; rank < num_ranks; ++rank) {
      new (&ack(rank, region)) Ack(0);
    }
  }
}

}  // namespace weft
