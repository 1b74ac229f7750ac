// SPDX-License-Identifier: Apache-2.0
// What FaultyTransport does to a wire, and how a transport's name asks for it.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace weft {

// Probabilities of each put or raise, in [0, 1].
struct FaultPlan {
  uint64_t seed = 1;   // with the rank, decides every fate in the order of calls
  double drop = 0;     // never arrives, its signal never grows
  double delay = 0;    // held back, also behind later ones
  double fail = 0;     // the call throws, nothing of it is sent
  double reorder = 0;  // of a call: its puts go out in random order
  std::chrono::microseconds hold = std::chrono::microseconds(500);  // longest delay
  bool hide_mapped = false;  // mapped() is null, so that all goes by put()
};

struct FaultyName {
  std::string inner;  // the transport that is wrapped
  FaultPlan plan;
};

// "faulty:shm?seed=7&delay=0.2&hide_mapped=1": keys are the members above, hold_us for `hold`.
// Empty for a name without that prefix. Throws Error (kInvalidArgument) naming the fault.
[[nodiscard]] std::optional<FaultyName> parse_faulty_name(std::string_view name);

}  // namespace weft
