// SPDX-License-Identifier: Apache-2.0
#include "cpu/protocol/region_map.hpp"

#include <gtest/gtest.h>

#include <set>

#include "call/chunks.hpp"

namespace weft::test {
namespace {

TEST(ControlMapTest, KeepsAllPartsApart) {
  for (const uint64_t num_ranks : {1U, 2U, 3U, 8U}) {
    const ControlMap map = {
        .num_ranks = num_ranks, .word_bytes = 712, .payload_bytes = 36, .record_bytes = 1001};
    uint64_t end = 0;  // of what came before, in ascending order
    for (uint64_t call = 0; call < 2; ++call) {
      for (uint64_t source = 0; source < num_ranks; ++source) {
        EXPECT_GE(map.call_offset(call, source), end);
        EXPECT_EQ(map.call_offset(call, source) % 64, 0U);
        end = map.call_offset(call, source) + map.word_bytes + map.payload_bytes;
      }
    }
    for (uint64_t source = 0; source < num_ranks; ++source) {
      EXPECT_GE(map.record_offset(source), end);
      end = map.record_offset(source) + sizeof(uint64_t) + map.record_bytes;
    }
    EXPECT_GE(map.num_bytes(), end);
  }
}

TEST(ControlMapTest, KeepsNeighbouringCallsApart) {
  const ControlMap map = {.num_ranks = 3, .word_bytes = 64, .payload_bytes = 0, .record_bytes = 64};
  EXPECT_NE(map.call_offset(7, 1), map.call_offset(8, 1));
  EXPECT_EQ(map.call_offset(7, 1), map.call_offset(9, 1));
}

TEST(SignalMapTest, GivesEachPurposeItsOwnSignal) {
  for (const uint32_t num_ranks : {1U, 2U, 5U}) {
    const SignalMap map = {.num_ranks = num_ranks, .max_chunks = 3};
    std::set<uint32_t> signals;
    size_t expected = 0;
    for (uint32_t source = 0; source < num_ranks; ++source) {
      signals.insert({map.call(6, source), map.call(7, source)});
      signals.insert({map.records(source), map.source_weights(source)});
      signals.insert({map.rows_read(source), map.interrupted(source)});
      for (uint32_t chunk = 0; chunk < map.max_chunks; ++chunk) {
        signals.insert({map.dispatch(source, chunk), map.combine(source, chunk)});
      }
      expected += 6 + 2 * map.max_chunks;
    }
    EXPECT_EQ(signals.size(), expected);
    EXPECT_LT(*signals.rbegin(), map.size());
  }
}

TEST(SignalMapTest, GivesCrossingsAndForwardedPairsTheirOwn) {
  const SignalMap map = {
      .num_ranks = 4, .max_chunks = 3, .has_crossings = true, .num_forwarded_pairs = 5};
  const uint32_t before =
      SignalMap{.num_ranks = 4, .max_chunks = 3, .has_crossings = false, .num_forwarded_pairs = 0}
          .size();
  std::set<uint32_t> signals;
  for (uint32_t chunk = 0; chunk < map.max_chunks; ++chunk) {
    for (uint32_t peer = 0; peer < map.num_ranks; ++peer) {
      signals.insert(map.crossing(peer, chunk));
    }
    for (uint32_t pair = 0; pair < map.num_forwarded_pairs; ++pair) {
      signals.insert(map.forwarded(pair, chunk));
    }
  }
  EXPECT_EQ(signals.size(), (4 + 5) * 3U);
  EXPECT_EQ(*signals.begin(), before);
  EXPECT_EQ(*signals.rbegin() + 1, map.size());
  EXPECT_EQ(map.needed(), map.size());
}

TEST(SignalMapTest, SaysHowManyAreNeededWhere32BitsDoNotSuffice) {
  const SignalMap map = {.num_ranks = 64, .max_chunks = 1 << 25};
  EXPECT_EQ(map.needed(), 6 * 64 + (uint64_t{2 * 64} << 25));
}

TEST(ChunkTest, CoversEveryItemOnce) {
  for (const int64_t num_items : {0, 1, 31, 32, 33, 100}) {
    int64_t next = 0;
    for (int64_t chunk = 0; chunk < num_chunks(num_items); ++chunk) {
      const ChunkRange range = chunk_range(num_items, chunk);
      EXPECT_EQ(range.first, next);
      EXPECT_GT(range.last, range.first);
      next = range.last;
    }
    EXPECT_EQ(next, num_items);
    const ChunkRange behind = chunk_range(num_items, num_chunks(num_items));
    EXPECT_EQ(behind.first, behind.last);
  }
}

}  // namespace
}  // namespace weft::test
