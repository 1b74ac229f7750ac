// SPDX-License-Identifier: Apache-2.0
// Facts that members of a GPU exchange tell each other before they connect, so that new processes
// learn them.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/transport/peer_regions.hpp"
#include "weft/exchange.hpp"

namespace weft {

inline constexpr uint64_t kUnknownCalls = ~uint64_t{0};

// Trivially copyable. A newcomer has made no call.
struct Facts {
  uint64_t last_call = kUnknownCalls;
  uint64_t stamp = 0;           // RankView's
  uint64_t fused_replicas = 0;  // as CudaExchange has them
  std::array<int64_t, 5> config = {};
};

// Returns hidden, max_tokens, num_experts, max_topk, copy_engines.
[[nodiscard]] std::array<int64_t, 5> sizes_of(const ExchangeConfig& config);

// Collective, among `who`. Returns the facts of the ranks that were there before. Throws Error
// (kPeerFailed) if none of these is left, kInvalidArgument if their config is not this rank's.
[[nodiscard]] Facts gather_facts(const Group& group, const Meeting& who, const Facts& own);

}  // namespace weft
