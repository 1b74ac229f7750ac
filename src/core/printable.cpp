// SPDX-License-Identifier: Apache-2.0
#include "core/printable.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

namespace weft {
namespace {

// Returns the bytes of the text's first character; 0: it begins with none that can be shown.
size_t shown_bytes(std::string_view text) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = at(0);
  if (first < 0x80) {
    return (first >= 0x20 && first != 0x7f) || first == '\n' || first == '\t' ? 1 : 0;
  }
  const size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < bytes) {
    return 0;
  }
  uint32_t code = first & (0x7fU >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((at(i) & 0xc0U) != 0x80) {
      return 0;
    }
    code = code << 6U | (at(i) & 0x3fU);
  }
  const bool is_longer_than_need_be = bytes > 2 && code < (bytes == 3 ? 0x800U : 0x10000U);
  const bool is_character = code >= 0xa0 && (code < 0xd800 || code > 0xdfff) && code <= 0x10ffff;
  return is_character && !is_longer_than_need_be ? bytes : 0;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const size_t bytes = shown_bytes(text);
    if (bytes == 0) {
      shown += fmt::format("\\x{:02x}", static_cast<unsigned char>(text.front()));
    } else {
      shown += text.substr(0, bytes);
    }
    text.remove_prefix(std::max<size_t>(bytes, 1));
  }
  return shown;
}

}  // namespace weft
