// SPDX-License-Identifier: Apache-2.0
// The CRC-32 of ISO 3309 (zip, PNG): finds torn and flipped bytes, proves nothing about authors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace weft {

namespace detail {
constexpr std::array<uint32_t, 256> make_crc32_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value & 1) != 0 ? 0xedb88320U ^ value >> 1 : value >> 1;
    }
    table[i] = value;
  }
  return table;
}
inline constexpr auto kCrc32Table = make_crc32_table();
}  // namespace detail

constexpr uint32_t crc32(std::span<const std::byte> bytes) {
  uint32_t value = 0xffffffffU;
  for (const std::byte byte : bytes) {
    value = detail::kCrc32Table[(value ^ static_cast<uint32_t>(byte)) & 0xffU] ^ value >> 8;
  }
  return ~value;
}

}  // namespace weft
