// SPDX-License-Identifier: Apache-2.0
#include "moe/text.hpp"

#include <span>

#include "core/atomic_file.hpp"
#include "core/check.hpp"

namespace weft::moe {

std::vector<std::byte> read_text(const std::string& path, int window) {
  const std::string text = read_whole_file(path);
  WEFT_CHECK(
      Context{},
      text.size() > static_cast<size_t>(window),
      ErrorCode::kFile,
      "read: {} holds {} B (more than the window of {} B)",
      path,
      text.size(),
      window
  );
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

}  // namespace weft::moe
