// SPDX-License-Identifier: Apache-2.0
// Spans of a region that shall not meet.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace weft::test {

struct ByteSpan {
  uint64_t begin = 0;
  uint64_t end = 0;
};

inline ByteSpan span_of(uint64_t first, int64_t count, uint64_t each) {
  return {first, first + static_cast<uint64_t>(count) * each};
}

// Expects that spans that are not empty do not meet, begin at a multiple of `alignment` and end
// within `num_bytes`.
inline void expect_apart(std::vector<ByteSpan> spans, uint64_t num_bytes, uint64_t alignment = 1) {
  std::erase_if(spans, [](const ByteSpan& span) { return span.begin == span.end; });
  std::ranges::sort(spans, {}, &ByteSpan::begin);
  uint64_t end = 0;
  for (const ByteSpan& span : spans) {
    EXPECT_GE(span.begin, end);
    EXPECT_EQ(span.begin % alignment, 0U);
    end = span.end;
  }
  EXPECT_LE(end, num_bytes);
}

}  // namespace weft::test
