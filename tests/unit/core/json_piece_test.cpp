// SPDX-License-Identifier: Apache-2.0
#include "core/json_piece.hpp"

#include <gtest/gtest.h>

namespace weft {
namespace {

using Json = nlohmann::json;

TEST(JsonPieceTest, IsBoundedInLengthAndDepth) {
  EXPECT_EQ(json_piece(Json::parse("\"a\\\"b\"")), "\"a\\\"b\"");
  EXPECT_EQ(json_piece(Json(-1.5)), "-1.5");
  EXPECT_EQ(json_piece(Json(std::string(1000, 'x'))), "\"" + std::string(36, 'x') + "...");
  EXPECT_EQ(json_piece(Json::parse("{\"b\":{}}")), "an object of 1");
  constexpr size_t kDepth = 1'000'000;  // deeper than the stack is
  const Json nested = Json::parse(std::string(kDepth, '[') + std::string(kDepth, ']'));
  EXPECT_EQ(json_piece(nested), "a list of 1");
}

}  // namespace
}  // namespace weft
