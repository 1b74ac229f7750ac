// SPDX-License-Identifier: Apache-2.0
#include "moe/beside.hpp"

#include <gtest/gtest.h>

#include "weft/group.hpp"

namespace weft::moe {
namespace {

bool takes_copies(int num_ranks, CopyEngines choice, int hidden, bool is_overlapped = true) {
  TrainConfig config;
  config.device = {Device::Kind::kCuda, 0};
  config.overlap.is_on = is_overlapped;
  config.overlap.copy_engines = choice;
  config.model.hidden = hidden;
  return copies_beside_computation(config, Group::local(num_ranks)[0]);
}

TEST(BesideTest, CopyEnginesCarryLongRows) {
  EXPECT_FALSE(takes_copies(2, CopyEngines::kAuto, 2032));
  EXPECT_TRUE(takes_copies(8, CopyEngines::kAuto, 2048));
  EXPECT_FALSE(takes_copies(9, CopyEngines::kAuto, 2048));
  EXPECT_TRUE(takes_copies(2, CopyEngines::kAlways, 16));
  EXPECT_FALSE(takes_copies(2, CopyEngines::kNever, 7168));
}

TEST(BesideTest, CopyEnginesNeedPeersOnGpusAndComputation) {
  EXPECT_FALSE(takes_copies(1, CopyEngines::kAlways, 7168));
  EXPECT_FALSE(takes_copies(2, CopyEngines::kAlways, 7168, false));
  TrainConfig config;
  config.overlap = {.is_on = true, .copy_engines = CopyEngines::kAlways};
  EXPECT_FALSE(copies_beside_computation(config, Group::local(2)[0]));  // on the host
}

TEST(BesideTest, CallsTakeAPartOfTheGpu) {
  EXPECT_EQ(sms_beside_computation(132, true), 64);
  EXPECT_EQ(sms_beside_computation(132, false), 32);
  EXPECT_EQ(sms_beside_computation(4, true), 2);
}

}  // namespace
}  // namespace weft::moe
