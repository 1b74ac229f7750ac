// SPDX-License-Identifier: Apache-2.0
// What every transport refuses, in the same words. Each throws Error (kTransport).
#pragma once

#include <string_view>

#include "core/check.hpp"
#include "transport/transport.hpp"

namespace weft {

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

// What this rank knows of the region that a put names.
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
      region.is_imported && !region.is_released,
      ErrorCode::kTransport,
      "put: region {} of rank {} is {}",
      put.region,
      rank,
      region.is_imported ? "released" : "not imported"
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

}  // namespace weft
