// SPDX-License-Identifier: Apache-2.0
// The global batch is cut into shards, the same for every number of ranks up to kNumShards, and a
// rank takes whole shards. Products over tokens run shard by shard and each shard's gradients are
// kept apart until their owner adds them, in shard order. So no rounding depends on the number of
// ranks: a run gives the same bits on one rank and on eight.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace weft::moe {

inline constexpr int64_t kNumShards = 8;

// Half-open.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  [[nodiscard]] int64_t size() const { return end - begin; }
};

[[nodiscard]] constexpr int64_t num_shards(int64_t num_ranks) {
  return std::max(kNumShards, num_ranks);
}
// At least one.
[[nodiscard]] constexpr Range shards_of_rank(int64_t rank, int64_t num_ranks) {
  const int64_t shards = num_shards(num_ranks);
  return {shards * rank / num_ranks, shards * (rank + 1) / num_ranks};
}

// The shards of one rank as ranges of its own tokens.
using Shards = std::vector<Range>;

[[nodiscard]] inline Shards one_shard(int64_t num_tokens) {
  return {{0, num_tokens}};
}

}  // namespace weft::moe
