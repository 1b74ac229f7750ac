// SPDX-License-Identifier: Apache-2.0
#include "kernels/device_control.hpp"

#include <gtest/gtest.h>

namespace weft {
namespace {

TEST(DeviceControlTest, HasRoomForEarlyRowsOfShortCalls) {
  EXPECT_EQ(early_row_room(4, 128, 7168), 14336U);
  EXPECT_EQ(early_row_room(4, 512, 4), 16U);
  EXPECT_EQ(early_row_room(4, 513, 4), 0U);
  EXPECT_EQ(early_row_room(32, 512, 7168), 0U);  // half a gigabyte
}

// Two calls that follow each other share nothing, and nothing lies on what the call words use.
TEST(DeviceControlTest, KeepsEarlyRowsOfTwoCallsApart) {
  const DeviceControlMap map = {4, 256, 100, 8, early_row_room(4, 100, 7168)};
  const uint64_t tokens = uint64_t{4} * 100;
  for (const uint32_t epoch : {6U, 7U}) {
    EXPECT_GE(map.early_rows_offset(epoch), map.stamp_offset() + sizeof(uint64_t));
    EXPECT_GE(
        map.early_scales_offset(epoch), map.early_rows_offset(epoch) + tokens * map.early_row_bytes
    );
    EXPECT_GE(
        map.early_weights_offset(epoch, 0),
        map.early_scales_offset(epoch) + tokens * kEarlyScaleBytes
    );
    EXPECT_EQ(
        map.early_weights_offset(epoch, 1) - map.early_weights_offset(epoch, 0),
        uint64_t{100} * 8 * sizeof(float)
    );
    EXPECT_EQ(map.early_rows_offset(epoch), map.early_rows_offset(epoch + 2));
  }
  EXPECT_LE(map.early_weights_offset(6, 4), map.early_rows_offset(7));
  EXPECT_LE(map.early_weights_offset(7, 4), map.num_bytes());
}

TEST(DeviceControlTest, NeedsNoMemoryWithoutEarlyRows) {
  const DeviceControlMap map = {4, 256, 4096, 8, early_row_room(4, 4096, 7168)};
  EXPECT_EQ(map.num_bytes(), map.stamp_offset() + 128);
}

}  // namespace
}  // namespace weft
