// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other beside the bytes of puts. All ranks run the same build, so the struct
// travels as it is.
#pragma once

#include <cstdint>

namespace weft::ofi {

enum class MessageKind : uint32_t {
  kRaise,     // signal a grows by b
  kReleased,  // region a, generation b of the sender is gone
  kLeft,      // the sender has said all it had to say on this queue
  kPing,      // nothing; that it was delivered is the news
};

struct Message {
  MessageKind kind = MessageKind::kPing;
  uint32_t from = 0;
  uint64_t session = 0;  // of this set of ranks; a stranger's is another
  uint64_t a = 0;
  uint64_t b = 0;
};

}  // namespace weft::ofi
