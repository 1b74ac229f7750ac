// SPDX-License-Identifier: Apache-2.0
#include "core/printable.hpp"

#include <gtest/gtest.h>

#include "core/check.hpp"

namespace weft {
namespace {

TEST(PrintableTest, KeepsCharactersAndSpellsOutOtherBytes) {
  for (const std::string_view text :
       {"",
        "plain",
        "lines\nand\ttabs",
        "\u00a0\u00e4\u20ac\ud7ff\ue000",
        "\U00010000\U0010ffff"}) {
    EXPECT_EQ(printable(text), text);
  }
  EXPECT_EQ(printable("a\x80\xff"), "a\\x80\\xff");
  EXPECT_EQ(printable("\x1b[2J\x7f"), "\\x1b[2J\\x7f");
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b");                    // a control character
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");                    // longer than need be
  EXPECT_EQ(printable("\xe0\x80\xaf"), "\\xe0\\x80\\xaf");           // likewise
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // a surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // behind the last one
  EXPECT_EQ(printable("\xe2\x82"), "\\xe2\\x82");                    // cut off
  EXPECT_EQ(printable("\xe2\x82z"), "\\xe2\\x82z");
  EXPECT_EQ(printable(std::string_view("\0", 1)), "\\x00");
}

TEST(PrintableTest, EveryErrorIs) {
  try {
    raise_error(ErrorCode::kFile, {}, "read: \xff");
  } catch (const Error& error) {
    EXPECT_TRUE(std::string_view(error.what()).starts_with("read: \\xff at ")) << error.what();
  }
}

}  // namespace
}  // namespace weft
