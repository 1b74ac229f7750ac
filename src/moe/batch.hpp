// SPDX-License-Identifier: Apache-2.0
// Which pieces of the text a step learns from: a function of seed, step and token number alone, so
// that any number of ranks shares the same global batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace weft::moe {

// Tokens [first, first + count) of the global batch; sizes differ by at most one between ranks.
struct TokenRange {
  int64_t first = 0;
  int64_t count = 0;
};

[[nodiscard]] TokenRange tokens_of_rank(int64_t global_batch, int rank, int num_ranks);

struct Batch {
  std::vector<std::byte> windows;  // [num_tokens, window]
  std::vector<std::byte> targets;  // [num_tokens] the byte after each window
};

// Draws windows from a text of more than `window` bytes.
class BatchSource {
 public:
  BatchSource(std::span<const std::byte> text, int window, uint64_t seed)
      : text_(text), window_(static_cast<size_t>(window)), seed_(seed) {}

  void draw(int64_t step, TokenRange tokens, Batch& batch) const;

 private:
  std::span<const std::byte> text_;
  size_t window_;
  uint64_t seed_;
};

}  // namespace weft::moe
