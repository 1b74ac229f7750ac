// SPDX-License-Identifier: Apache-2.0
// What of a trainer's exchange goes by copy engines.

#include <gtest/gtest.h>

#include <vector>

#include "support/errors.hpp"
#include "train/trainer.hpp"
#include "weft/error.hpp"
#include "weft/group.hpp"

namespace weft::moe {
namespace {

bool takes_copies(int num_ranks, CopyEngines choice, int hidden, bool is_overlapped = true) {
  TrainConfig config;
  config.device = {Device::Kind::kCuda, 0};
  config.overlap.is_on = is_overlapped;
  config.overlap.copy_engines = choice;
  config.model.hidden = hidden;
  return uses_copy_engines(config, Group::local(num_ranks)[0]);
}

TEST(CopyEnginesTest, CarryLongRows) {
  EXPECT_FALSE(takes_copies(2, CopyEngines::kAuto, 2032));
  EXPECT_TRUE(takes_copies(8, CopyEngines::kAuto, 2048));
  EXPECT_FALSE(takes_copies(9, CopyEngines::kAuto, 2048));
  EXPECT_TRUE(takes_copies(2, CopyEngines::kAlways, 16));
  EXPECT_FALSE(takes_copies(2, CopyEngines::kNever, 7168));
}

TEST(CopyEnginesTest, NeedPeersOnGpusAndComputation) {
  EXPECT_FALSE(takes_copies(1, CopyEngines::kAlways, 7168));
  EXPECT_FALSE(takes_copies(2, CopyEngines::kAlways, 7168, false));
  TrainConfig config;
  config.overlap = {.is_on = true, .copy_engines = CopyEngines::kAlways};
  EXPECT_FALSE(uses_copy_engines(config, Group::local(2)[0]));  // on the host
}

// What was asked for, in order, by a maker that fails with `code` while room for copies is wanted.
std::vector<bool> rooms_asked_for(bool copy_engines, ErrorCode code) {
  std::vector<bool> asked;
  const ExchangeConfig wanted = {
      .hidden = 16, .max_tokens = 4, .num_experts = 2, .copy_engines = copy_engines};
  const auto make = [&](const ExchangeConfig& config) {
    asked.push_back(config.copy_engines);
    if (config.copy_engines || code == ErrorCode::kTimeout) {
      throw Error(code, "no room", 0, "");
    }
    return Exchange(Group::local(1)[0], config);
  };
  const auto thrown = test::thrown_by([&] {
    const Exchange exchange = make_exchange(wanted, make);
    EXPECT_FALSE(exchange.config().copy_engines);
    EXPECT_EQ(exchange.config().hidden, 16);
  });
  EXPECT_EQ(thrown.has_value(), code != ErrorCode::kOutOfMemory);
  return asked;
}

TEST(CopyEnginesTest, AreDoneWithoutWhereMemoryIsShort) {
  using Asked = std::vector<bool>;
  EXPECT_EQ(rooms_asked_for(true, ErrorCode::kOutOfMemory), (Asked{true, false}));
  EXPECT_EQ(rooms_asked_for(false, ErrorCode::kOutOfMemory), Asked{false});
  EXPECT_EQ(rooms_asked_for(true, ErrorCode::kCuda), Asked{true});
  EXPECT_EQ(rooms_asked_for(false, ErrorCode::kTimeout), Asked{false});
}

}  // namespace
}  // namespace weft::moe
