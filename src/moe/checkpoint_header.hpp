// SPDX-License-Identifier: Apache-2.0
// The first 4096 bytes of a checkpoint.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "moe/checkpoint.hpp"

namespace weft::moe {

inline constexpr size_t kHeaderBytes = 4096;
using HeaderBytes = std::array<std::byte, kHeaderBytes>;

struct HeaderContents {
  int64_t steps_done = 0;
  uint64_t data_checksum = 0;
};

[[nodiscard]] HeaderBytes encode_header(const CheckpointHeader& header, uint64_t data_checksum);

// Throws Error (kFile) naming the file and the field that is missing, damaged or unlike `expected`.
[[nodiscard]] HeaderContents decode_header(
    std::span<const std::byte> bytes, const CheckpointHeader& expected, const std::string& path
);

}  // namespace weft::moe
