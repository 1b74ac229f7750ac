// SPDX-License-Identifier: Apache-2.0
// Records of several receivers in one message.
#include <gtest/gtest.h>

#include <algorithm>

#include "plan/build.hpp"

namespace weft {
namespace {

std::string refusal(std::span<const std::byte> bundle, size_t num_receivers) {
  try {
    static_cast<void>(unbundle_records(bundle, num_receivers, 4, {}));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTransport);
    const std::string text = error.what();
    return text.substr(0, text.find(" at "));
  }
  return "none";
}

using Blocks = std::vector<std::vector<std::byte>>;

TEST(BundleTest, GivesEachReceiverItsOwn) {
  const Blocks blocks = {
      {std::byte{1}, std::byte{2}}, {}, {std::byte{3}, std::byte{4}, std::byte{5}}};
  const std::vector<std::byte> bundle = bundle_records(blocks);
  EXPECT_EQ(bundle.size(), 3 * sizeof(uint64_t) + 5);
  const auto records = unbundle_records(bundle, 3, 0, {});
  ASSERT_EQ(records.size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(std::ranges::equal(records[i], blocks[i]));
  }
  EXPECT_TRUE(unbundle_records({}, 0, 0, {}).empty());
}

TEST(BundleTest, RefusesWhatDoesNotAddUp) {
  const Blocks blocks = {{std::byte{1}, std::byte{2}}, {std::byte{3}}};
  std::vector<std::byte> bundle = bundle_records(blocks);
  EXPECT_EQ(
      refusal(bundle, 3), "plan: records of rank 4 are malformed: they end before receiver 2 of 3"
  );
  EXPECT_EQ(
      refusal(bundle, 1), "plan: records of rank 4 are malformed: 9 B follow those of 1 receivers"
  );
  bundle.pop_back();
  EXPECT_EQ(
      refusal(bundle, 2), "plan: records of rank 4 are malformed: receiver 1 has 1 B (0 B are left)"
  );
  EXPECT_EQ(
      refusal({}, 2), "plan: records of rank 4 are malformed: they end before receiver 0 of 2"
  );
}

// Room is enough whether every token goes to every receiver or all routes go to one.
TEST(BundleTest, FitsTheRoomThatIsSetAside) {
  constexpr int kTokens = 5;
  for (const int topk : {1, 3, 8}) {
    for (const int num_receivers : {1, 2, 4}) {
      Blocks blocks(static_cast<size_t>(num_receivers));
      for (const bool is_spread : {true, false}) {
        std::vector<Arrivals> pairs(static_cast<size_t>(num_receivers));
        for (Arrivals& pair : pairs) {
          pair.route_begin = {0};
        }
        for (int32_t token = 0; token < kTokens; ++token) {
          for (int32_t k = 0; k < topk; ++k) {
            Arrivals& pair = pairs[static_cast<size_t>(is_spread ? k % num_receivers : 0)];
            if (pair.token.empty() || pair.token.back() != token) {
              pair.token.push_back(token);
              pair.route_begin.push_back(pair.route_begin.back());
            }
            ++pair.route_begin.back();
            pair.slot.push_back(0);
            pair.k.push_back(k);
            pair.expert.push_back(0);
            pair.weight.push_back(1);
          }
        }
        std::ranges::transform(pairs, blocks.begin(), encode_records);
        const uint64_t most = max_bundle_bytes(kTokens, topk, num_receivers);
        EXPECT_LE(bundle_records(blocks).size(), most);
        if (is_spread) {
          EXPECT_EQ(bundle_records(blocks).size(), most);
        }
      }
    }
  }
}

}  // namespace
}  // namespace weft
