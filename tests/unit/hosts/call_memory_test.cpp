// SPDX-License-Identifier: Apache-2.0
// Places of messages between domains, and of what lies in them.
#include "hosts/call_memory.hpp"

#include <gtest/gtest.h>

#include <functional>

#include "byte_spans.hpp"

namespace weft::test {
namespace {

constexpr int64_t kMessageBytes = int64_t{1} << 20;

ByteSpan part_of_message(int64_t first, int64_t count, int64_t each) {
  return span_of(static_cast<uint64_t>(first), count, static_cast<uint64_t>(each));
}

void for_each_chunk(const std::function<void(const MessageFormat&)>& visit) {
  for (const int64_t rows : {0, 16, 48, 4096, 14336, 1 << 19, 3 << 20}) {
    for (const int64_t weights : {0, 4, 32}) {
      for (const int64_t scales : {0, 7, 448}) {
        SCOPED_TRACE(::testing::Message() << rows << " + " << weights << " + " << scales);
        const MessageFormat chunk = message_format(rows, weights, scales, kChunkArrivals);
        EXPECT_EQ(chunk.token_bytes(), rows + weights + scales);
        visit(chunk);
      }
    }
  }
}

// Counts of rows at which something changes.
std::vector<int64_t> counts_of(const MessageFormat& chunk) {
  std::vector<int64_t> counts = {0, 1, kChunkArrivals, kChunkArrivals + 1, 1000};
  for (const int64_t messages : {1, 2, 3}) {
    for (const int64_t more : {-1, 0, 1}) {
      counts.push_back(messages * chunk.rows + more);
    }
  }
  return counts;
}

TEST(AreaMapTest, PutsAreasSideBySide) {
  AreaMap map;
  EXPECT_EQ(map.num_bytes(), 0U);
  std::vector<ByteSpan> areas;
  for (const int64_t bytes : {1, 256, 0, 257, 4096, 255}) {
    const uint64_t offset = map.add(static_cast<uint64_t>(bytes));
    EXPECT_EQ(offset % AreaMap::kAlignment, 0U);
    areas.push_back({offset, offset + static_cast<uint64_t>(bytes)});
  }
  expect_apart(areas, map.num_bytes());
  EXPECT_EQ(map.num_bytes(), 256U + 256U + 512U + 4096U + 256U);
}

// Each peer has the same number of signals set aside, whatever a row's size.
TEST(MessageFormatTest, NeedsNoMoreSignalsThanThereAre) {
  for_each_chunk([](const MessageFormat& chunk) {
    EXPECT_GE(chunk.rows, kChunkArrivals);
    for (const int64_t count : counts_of(chunk)) {
      EXPECT_LE(chunk.num_chunks(count), num_chunks(count));
    }
  });
}

TEST(MessageFormatTest, FillsAMessageButNotMore) {
  for_each_chunk([](const MessageFormat& chunk) {
    const int64_t token = chunk.token_bytes();
    if (token == 0 || token * kChunkArrivals > kMessageBytes) {
      EXPECT_EQ(chunk.rows, kChunkArrivals);
      return;
    }
    EXPECT_LE(chunk.rows * token, kMessageBytes);
    EXPECT_GT((chunk.rows + 1) * token, kMessageBytes);
  });
}

TEST(MessageFormatTest, MessagesHoldEachRowOnce) {
  for_each_chunk([](const MessageFormat& chunk) {
    for (const int64_t count : counts_of(chunk)) {
      int64_t next = 0;
      for (int64_t c = 0; c < chunk.num_chunks(count); ++c) {
        EXPECT_EQ(chunk.first_row(c), next);
        const bool is_last = c + 1 == chunk.num_chunks(count);
        EXPECT_GE(chunk.num_rows(c, count), is_last ? 1 : chunk.rows);
        EXPECT_LE(chunk.num_rows(c, count), chunk.rows);
        next += chunk.num_rows(c, count);
      }
      EXPECT_EQ(next, count);
    }
  });
}

TEST(MessageFormatTest, MessagesOfAnAreaAreApart) {
  for_each_chunk([](const MessageFormat& chunk) {
    EXPECT_EQ(chunk.stride() % 64, 0);
    for (const int64_t count : counts_of(chunk)) {
      std::vector<ByteSpan> parts;
      uint64_t end = 0;
      for (int64_t c = 0; c < chunk.num_chunks(count); ++c) {
        const int64_t begin = c * chunk.stride();
        const int64_t num = chunk.num_rows(c, count);
        parts.push_back(part_of_message(begin, num, chunk.row_bytes));
        parts.push_back(part_of_message(begin + chunk.weights_at(num), num, chunk.weight_bytes));
        parts.push_back(part_of_message(begin + chunk.scales_at(num), num, chunk.scale_bytes));
        end = static_cast<uint64_t>(begin + num * chunk.token_bytes());
        EXPECT_EQ(parts.back().end, end);
      }
      expect_apart(parts, end);
      EXPECT_EQ(chunk.area_bytes(count), static_cast<int64_t>(end));
    }
  });
}

// Room that is set aside for the most tokens is enough for fewer, in messages of any size.
TEST(MessageFormatTest, TakesLittleMoreThanItsRows) {
  for_each_chunk([](const MessageFormat& chunk) {
    for (const int64_t count : counts_of(chunk)) {
      EXPECT_GE(chunk.area_bytes(count), count * chunk.token_bytes());
      EXPECT_LE(chunk.area_bytes(count), count * chunk.token_bytes() + 64 * num_chunks(count));
      EXPECT_LE(chunk.area_bytes(count), chunk.area_bytes(count + 1));
    }
  });
}

}  // namespace
}  // namespace weft::test
