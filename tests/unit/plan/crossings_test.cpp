// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>

#include "plan/domain_traffic.hpp"

namespace weft {
namespace {

using Ints = std::vector<int32_t>;

Arrivals arrivals_of(const Ints& tokens) {
  Arrivals arrivals;
  arrivals.token = tokens;
  return arrivals;
}

TEST(CrossingsTest, ListsEachTokenOnceInOrder) {
  const Arrivals first = arrivals_of({0, 3, 7});
  const Arrivals none = arrivals_of({});
  const Arrivals last = arrivals_of({1, 3, 8, 9});
  const std::array<const Arrivals*, 3> pairs = {&first, &none, &last};
  EXPECT_EQ(crossing_tokens(pairs), (Ints{0, 1, 3, 7, 8, 9}));

  const Crossings found = find_crossings(pairs);
  EXPECT_EQ(found.token, crossing_tokens(pairs));
  EXPECT_EQ(found.crossing[0], (Ints{0, 2, 3}));
  EXPECT_EQ(found.crossing[1], (Ints{}));
  EXPECT_EQ(found.crossing[2], (Ints{1, 2, 4, 5}));
  const Ints of_first = {0, -1, 1, 2, -1, -1};
  const Ints of_last = {-1, 0, 1, -1, 2, 3};
  for (int64_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found.arrival_at(i, 0), of_first[static_cast<size_t>(i)]);
    EXPECT_EQ(found.arrival_at(i, 1), -1);
    EXPECT_EQ(found.arrival_at(i, 2), of_last[static_cast<size_t>(i)]);
  }
}

TEST(CrossingsTest, TakesPairsThatAreEmptyOrMissing) {
  const Arrivals none = arrivals_of({});
  const std::array<const Arrivals*, 2> pairs = {&none, nullptr};
  EXPECT_TRUE(crossing_tokens(pairs).empty());
  EXPECT_EQ(find_crossings(pairs).size(), 0);
  EXPECT_EQ(find_crossings({}).size(), 0);
}

}  // namespace
}  // namespace weft
