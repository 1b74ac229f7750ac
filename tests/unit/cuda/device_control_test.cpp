// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <utility>

#include "cuda/layout/control.hpp"

namespace weft {
namespace {

TEST(DeviceControlTest, HasRoomForEagerRowsOfShortCalls) {
  EXPECT_EQ(eager_row_room(4, 128, 8, 7168), 14336U);
  EXPECT_EQ(eager_row_room(4, 512, 8, 4), 16U);
  EXPECT_EQ(eager_row_room(4, 513, 8, 4), 0U);
  EXPECT_EQ(eager_row_room(32, 512, 1, 7168), 0U);  // half a gigabyte
  EXPECT_EQ(eager_row_room(8, 512, 8, 4), 16U);
  EXPECT_EQ(eager_row_room(8, 512, 9, 4), 0U);  // more routes than shared memory holds
}

TEST(DeviceControlTest, SaysHowManySignalsAreNeededWhere32BitsDoNotSuffice) {
  for (const uint32_t ranks : {1U, 3U, 32U}) {
    const SignalSlots slots = {.num_ranks = ranks, .max_chunks = 100};
    EXPECT_EQ(slots.needed(), slots.size());
  }
  const SignalSlots many = {.num_ranks = 32, .max_chunks = uint32_t{1} << 27};
  EXPECT_EQ(many.needed(), (uint64_t{1} << 33) + 10 * 32);
}

// Eager rows hold one for each choice of a token where it has more than there are ranks, if they
// are not too many.
TEST(DeviceControlTest, HasRoomForARowOfEachRoute) {
  const auto row_bytes = [](uint32_t ranks, uint32_t tokens, uint32_t topk) {
    const DeviceControlMap map = {
        ranks, 256, tokens, topk, eager_row_room(ranks, tokens, topk, 7168)};
    const uint64_t bytes = map.eager_scales_offset(6) - map.eager_rows_offset(6);
    return std::pair(map.has_route_rows, bytes / 14336);
  };
  EXPECT_EQ(row_bytes(2, 128, 8), std::pair(true, uint64_t{8} * 128));
  EXPECT_EQ(row_bytes(8, 128, 8), std::pair(true, uint64_t{8} * 128));
  EXPECT_EQ(row_bytes(8, 128, 4), std::pair(true, uint64_t{8} * 128));
  EXPECT_EQ(row_bytes(1, 512, 32), std::pair(false, uint64_t{512}));  // half a gigabyte
  EXPECT_FALSE(row_bytes(4, 4096, 8).first);
}

// Two calls that follow each other share nothing, and nothing lies on what the handshakes use.
TEST(DeviceControlTest, KeepsEagerRowsOfTwoCallsApart) {
  const DeviceControlMap map = {4, 256, 100, 8, eager_row_room(4, 100, 8, 7168)};
  const uint64_t tokens = uint64_t{4} * 100;
  for (const uint32_t epoch : {6U, 7U}) {
    EXPECT_GE(map.eager_rows_offset(epoch), map.stamp_offset() + sizeof(uint64_t));
    EXPECT_GE(
        map.eager_scales_offset(epoch), map.eager_rows_offset(epoch) + tokens * map.eager_row_bytes
    );
    EXPECT_GE(
        map.eager_weights_offset(epoch, 0), map.eager_scales_offset(epoch) + tokens * kScaleRoom
    );
    EXPECT_EQ(
        map.eager_weights_offset(epoch, 1) - map.eager_weights_offset(epoch, 0),
        uint64_t{100} * 8 * sizeof(float)
    );
    EXPECT_EQ(map.eager_rows_offset(epoch), map.eager_rows_offset(epoch + 2));
  }
  EXPECT_LE(map.eager_weights_offset(6, 4), map.eager_rows_offset(7));
  EXPECT_LE(map.eager_weights_offset(7, 4), map.num_bytes());
}

TEST(DeviceControlTest, KeepsRoutingOfTwoCallsAndOfEveryRankApart) {
  const DeviceControlMap map = {4, 256, 100, 8, eager_row_room(4, 100, 8, 7168)};
  const RoutingMap routing = map.routing();
  EXPECT_EQ(routing.max_routes, 800U);
  EXPECT_GE(RoutingMap::experts(), RoutingMap::kFields);
  EXPECT_EQ(routing.weights(), RoutingMap::experts() + 800);
  EXPECT_EQ(routing.size(), routing.weights() + 800);
  const uint64_t bytes = sizeof(uint64_t) * routing.size();
  EXPECT_GE(map.routing_offset(6, 0), map.eager_weights_offset(7, 4));
  for (const uint32_t epoch : {6U, 7U}) {
    EXPECT_GE(map.routing_offset(epoch, 1), map.routing_offset(epoch, 0) + bytes);
    EXPECT_EQ(map.routing_offset(epoch, 3), map.routing_offset(epoch + 2, 3));
  }
  EXPECT_GE(map.routing_offset(7, 0), map.routing_offset(6, 3) + bytes);
  EXPECT_GE(map.eager_slots_offset(0), map.routing_offset(7, 3) + bytes);
  EXPECT_GE(map.eager_slots_offset(1), map.eager_slots_offset(0) + 800 * sizeof(EagerSlot));
  EXPECT_EQ(map.eager_slots_offset(4), map.second_word_offset(6, 0));
}

// Nothing of one call's second handshake lies on another call's, or on what else there is.
TEST(DeviceControlTest, KeepsSecondHandshakesApart) {
  const uint32_t eager = eager_row_room(4, 100, 8, 7168);
  const DeviceControlMap map = {4, 256, 100, 8, eager, copied_token_room(8, 7168)};
  const uint64_t bytes = sizeof(DeviceHandshake) + sizeof(int32_t) * (4 + 256 + 4 * kMostReplicas);
  EXPECT_GE(map.second_word_offset(6, 0), map.copied_offset(1, 3) + map.copied_stride);
  for (const uint32_t epoch : {6U, 7U}) {
    EXPECT_GE(map.second_word_offset(epoch, 1), map.second_word_offset(epoch, 0) + bytes);
    EXPECT_EQ(map.second_word_offset(epoch, 3), map.second_word_offset(epoch + 2, 3));
  }
  EXPECT_GE(map.second_word_offset(7, 0), map.second_word_offset(6, 3) + bytes);
  EXPECT_GE(map.num_bytes(), map.second_word_offset(7, 3) + bytes);
  const SignalSlots signals = map.signals();
  EXPECT_EQ(signals.second_word(6, 0), signals.copying(4));
  EXPECT_EQ(signals.second_word(7, 0), signals.second_word(6, 4));
  EXPECT_EQ(signals.whole(0), signals.second_word(7, 4));
  EXPECT_EQ(signals.size(), signals.whole(4));
}

TEST(DeviceControlTest, NeedsNoMemoryWithoutEagerRows) {
  const DeviceControlMap map = {4, 256, 4096, 8, eager_row_room(4, 4096, 8, 7168)};
  EXPECT_EQ(map.second_word_offset(6, 0), map.stamp_offset() + 128);
}

// Each source has its block in each of the two areas, behind all else.
TEST(DeviceControlTest, KeepsCopiedRowsApart) {
  const uint64_t token = copied_token_room(8, 7168);
  EXPECT_EQ(token, 14336U + kScaleRoom + 32);
  for (const uint32_t eager : {0U, eager_row_room(4, 100, 8, 7168)}) {
    const DeviceControlMap without = {4, 256, 100, 8, eager};
    const DeviceControlMap map = {4, 256, 100, 8, eager, token};
    EXPECT_GE(map.copied_stride, 100 * token);
    EXPECT_EQ(map.copied_offset(0, 0), without.second_word_offset(6, 0));
    EXPECT_EQ(map.copied_offset(0, 1), map.copied_offset(0, 0) + map.copied_stride);
    EXPECT_EQ(map.copied_offset(1, 0), map.copied_offset(0, 4));
    EXPECT_EQ(map.second_word_offset(6, 0), map.copied_offset(1, 4));
    EXPECT_EQ(map.eager_slots_offset(4), without.eager_slots_offset(4));
  }
}

TEST(DeviceControlTest, PutsPartsOfCopiedRowsBehindEachOther) {
  const CopiedRows rows = {.row_bytes = 64, .scale_bytes = 16, .weight_bytes = 32};
  EXPECT_EQ(rows.scales_offset(10), 640);
  EXPECT_EQ(rows.weights_offset(10), 800);
  EXPECT_EQ(rows.num_bytes(10), 1120);
  EXPECT_EQ(rows.num_bytes(0), 0);
}

}  // namespace
}  // namespace weft
