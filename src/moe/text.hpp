// SPDX-License-Identifier: Apache-2.0
// The text that is learned: any file, read as bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace weft::moe {

// Throws Error (kFile) naming the file if it cannot be read or holds at most `window` bytes.
[[nodiscard]] std::vector<std::byte> read_text(const std::string& path, int window);

}  // namespace weft::moe
