// SPDX-License-Identifier: Apache-2.0
// Pieces of the text that a step learns from: a function of only seed, step and token number, so
// that any number of ranks shares the same global batch.
//
// The global batch is cut into shards, the same for every number of ranks up to kNumShards, and a
// rank takes whole shards. Products over tokens run shard by shard and each shard's gradients are
// kept apart until their owner adds them, in shard order. So no rounding depends on the number of
// ranks: a run gives the same bits on one rank and on eight.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
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

// Returns the tokens of the global batch that are a rank's: those of its shards, one after another.
[[nodiscard]] Range tokens_of_rank(int64_t global_batch, int64_t rank, int64_t num_ranks);
// A rank's shards as ranges of its own tokens.
[[nodiscard]] Shards make_shards(int64_t global_batch, int64_t rank, int64_t num_ranks);

// One rank's part of a micro-batch: a run of the global batch is shared out as a whole one would
// be.
struct MicroBatch {
  Range tokens;   // of the global batch
  Shards shards;  // as ranges of these tokens
};
// All of a step, in order. Their gradients are added in this order to those of the shards, so that
// every sum has one order for any number of ranks.
[[nodiscard]] std::vector<MicroBatch> make_micro_batches(
    int64_t global_batch, int64_t num_micro_batches, int64_t rank, int64_t num_ranks
);

struct Batch {
  std::vector<std::byte> windows;  // [num_tokens, window]
  std::vector<std::byte> targets;  // [num_tokens] the byte after each window
};

// Draws windows from a text of more than `window` bytes.
class BatchSource {
 public:
  BatchSource(std::span<const std::byte> text, int window, uint64_t seed)
      : text_(text), window_(static_cast<size_t>(window)), seed_(seed) {}

  void draw(int64_t step, Range tokens, Batch& batch) const;

 private:
  std::span<const std::byte> text_;
  size_t window_;
  uint64_t seed_;
};

// The text that is learned: a file or a pipe, read as bytes. Throws Error (kFile) naming the file
// if it cannot be read or holds at most `window` bytes.
[[nodiscard]] std::vector<std::byte> read_text(const std::string& path, int window);

}  // namespace weft::moe
