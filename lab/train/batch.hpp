// SPDX-License-Identifier: Apache-2.0
// Which pieces of the text a step learns from: a function of only seed, step and token number, so
// that any number of ranks shares the same global batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "train/shards.hpp"

namespace weft::moe {

// Which tokens of the global batch are a rank's: those of its shards, one after another.
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

// The text that is learned: any file, read as bytes. Throws Error (kFile) naming the file if it
// cannot be read or holds at most `window` bytes.
[[nodiscard]] std::vector<std::byte> read_text(const std::string& path, int window);

}  // namespace weft::moe
