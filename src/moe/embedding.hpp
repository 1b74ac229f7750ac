// SPDX-License-Identifier: Apache-2.0
// A token is the sum over its window of a vector for each (position, byte) pair: the product with a
// wide one-hot row, without the zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "moe/matrix.hpp"

namespace weft::moe {

inline constexpr int kNumBytes = 256;  // values of a byte

class Embedding {
 public:
  // table: [window, kNumBytes, hidden].
  Embedding(Parameter table, int window, int hidden)
      : table_(table), window_(window), hidden_(hidden) {}

  // windows: [num_tokens, window].
  void forward(std::span<const std::byte> windows, Matrix& x) const;
  void backward(std::span<const std::byte> windows, const Matrix& grad_x, const Shards& shards);

 private:
  // Where the vector of a byte at a position begins in the table.
  [[nodiscard]] int64_t vector_at(int64_t position, std::byte value) const {
    return (position * kNumBytes + std::to_integer<int64_t>(value)) * hidden_;
  }

  Parameter table_;
  int64_t window_;
  int64_t hidden_;
};

}  // namespace weft::moe
