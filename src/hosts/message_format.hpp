// SPDX-License-Identifier: Apache-2.0
// How rows lie in the messages between a source and its forwarder: some rows, then their weights,
// then their scale rows. Both ends derive the format from the call.
#pragma once

#include <cstdint>

#include "core/hd.hpp"

namespace weft {

struct MessageFormat {
  int64_t row_bytes = 0;     // a multiple of 16, or 0
  int64_t weight_bytes = 0;  // of a token
  int64_t scale_bytes = 0;
  int64_t rows = 1;  // of every message but the last

  [[nodiscard]] WEFT_HD constexpr int64_t token_bytes() const {
    return row_bytes + weight_bytes + scale_bytes;
  }
  [[nodiscard]] WEFT_HD constexpr int64_t stride() const {
    return (rows * token_bytes() + 63) / 64 * 64;
  }
  [[nodiscard]] WEFT_HD constexpr int64_t num_chunks(int64_t count) const {
    return (count + rows - 1) / rows;
  }
  // Returns the bytes of the messages for so many rows.
  [[nodiscard]] WEFT_HD constexpr int64_t area_bytes(int64_t count) const {
    const int64_t last = num_chunks(count) - 1;
    return last < 0 ? 0 : last * stride() + num_rows(last, count) * token_bytes();
  }
  [[nodiscard]] WEFT_HD constexpr int64_t first_row(int64_t chunk) const { return chunk * rows; }
  [[nodiscard]] WEFT_HD constexpr int64_t num_rows(int64_t chunk, int64_t count) const {
    const int64_t left = count - first_row(chunk);
    return left < rows ? left : rows;
  }
  // Offsets of weights and scales in a message of `num` rows.
  [[nodiscard]] WEFT_HD constexpr int64_t weights_at(int64_t num) const { return num * row_bytes; }
  [[nodiscard]] WEFT_HD constexpr int64_t scales_at(int64_t num) const {
    return num * (row_bytes + weight_bytes);
  }
};

// Returns messages of about a megabyte, as smaller ones cost a network more than they carry, but of
// at least `least` rows, so that there is a signal for each message.
[[nodiscard]] constexpr MessageFormat message_format(
    int64_t row_bytes, int64_t weight_bytes, int64_t scale_bytes, int64_t least
) {
  constexpr int64_t kMessageBytes = int64_t{1} << 20;
  MessageFormat format = {row_bytes, weight_bytes, scale_bytes, least};
  const int64_t token = format.token_bytes();
  if (token > 0 && kMessageBytes / token > least) {
    format.rows = kMessageBytes / token;
  }
  return format;
}

}  // namespace weft
