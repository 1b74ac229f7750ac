// SPDX-License-Identifier: Apache-2.0
// Common parts of all transports: who speaks in their errors, what they refuse in the same words,
// and how long a waiting rank spins.
#pragma once

#include <algorithm>
#include <chrono>
#include <string_view>
#include <thread>

#include "core/check.hpp"
#include "core/clock.hpp"
#include "group/control_plane.hpp"
#include "transport/transport.hpp"

namespace weft {

// These checks throw Error (kTransport), or LostPeerError if a peer has released the region.
inline void check_rank(const Context& context, std::string_view verb, int rank) {
  WEFT_CHECK(
      context,
      rank >= 0 && rank < context.num_ranks,
      ErrorCode::kTransport,
      "{}: rank {} is out of range (num_ranks = {})",
      verb,
      rank,
      context.num_ranks
  );
}

inline void check_signal(
    const Context& context, std::string_view verb, int rank, uint32_t signal, uint32_t num_signals
) {
  WEFT_CHECK(
      context,
      signal < num_signals,
      ErrorCode::kTransport,
      "{}: signal {} of rank {} is out of range (num_signals = {})",
      verb,
      signal,
      rank,
      num_signals
  );
}

// State of the region that a put names, as this rank knows it.
struct PutRegion {
  bool is_imported = false;
  bool is_released = false;
  uint64_t bytes = 0;
};

inline void check_put(
    const Context& context, int rank, const Put& put, const PutRegion& region, uint32_t num_signals
) {
  WEFT_CHECK(
      context,
      region.is_imported,
      ErrorCode::kTransport,
      "put: region {} of rank {} is not imported",
      put.region,
      rank
  );
  WEFT_CHECK(
      context.without(rank),
      !region.is_released,
      ErrorCode::kTransport,
      "put: region {} of rank {} is released",
      put.region,
      rank
  );
  WEFT_CHECK(
      context,
      put.offset <= region.bytes && put.bytes <= region.bytes - put.offset,
      ErrorCode::kTransport,
      "put: {} B at offset {} end past region {} of rank {} ({} B)",
      put.bytes,
      put.offset,
      put.region,
      rank,
      region.bytes
  );
  check_signal(context, "put", rank, put.signal, num_signals);
}

inline void check_importable(
    const Context& context, int rank, const RegionRef& region, bool is_allocated
) {
  WEFT_CHECK(
      context.without(rank),
      is_allocated,
      ErrorCode::kTransport,
      "import: region {} generation {} of rank {} is not allocated there",
      region.slot,
      region.generation,
      rank
  );
}

inline void check_same_signals(
    const Context& context, int rank, uint64_t theirs, uint32_t num_signals
) {
  WEFT_CHECK_ARG(
      context,
      theirs == num_signals,
      "connect: rank {} asks for {} signals (this rank for {})",
      rank,
      theirs,
      num_signals
  );
}

// A wake-up through the kernel costs tens of microseconds, so a rank with a core of its own spins
// for a while first; where ranks share cores, spinning keeps the awaited peer from running.
[[nodiscard]] inline std::chrono::nanoseconds spin_time(const Group& group) {
  const auto& hosts = group.topology().host_of;
  const auto rank = static_cast<size_t>(group.rank());
  const auto on_host = std::count(hosts.begin(), hosts.end(), hosts[rank]);
  const bool has_core = on_host <= static_cast<int64_t>(std::thread::hardware_concurrency());
  return has_core ? std::chrono::microseconds(20) : std::chrono::microseconds(1);
}

// Spins for `spin` at most until `has_moved()`, with `relax(i)` after the i-th look of a round.
// Returns what is left of `at_most` for sleeping; zero: it has moved, or time is up.
template <class HasMoved, class Relax>
[[nodiscard]] std::chrono::nanoseconds spin_until(
    std::chrono::nanoseconds spin,
    std::chrono::nanoseconds at_most,
    const HasMoved& has_moved,
    const Relax& relax
) {
  constexpr size_t kLooksPerClock = 16;  // reading a clock costs as much as some looks
  const auto begin = Clock::now();
  const auto spin_end = begin + std::min(spin, at_most);
  do {
    for (size_t look = 0; look < kLooksPerClock; ++look) {
      if (has_moved()) {
        return {};
      }
      relax(look);
    }
  } while (Clock::now() < spin_end);
  return std::max<std::chrono::nanoseconds>(at_most - (Clock::now() - begin), {});
}

}  // namespace weft
