// SPDX-License-Identifier: Apache-2.0
#include "moe/text.hpp"

#include <cerrno>
#include <cstdio>
#include <memory>

#include "core/check.hpp"

namespace weft::moe {

std::vector<std::byte> read_text(const std::string& path, int window) {
  const Context context = {};
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(
      std::fopen(path.c_str(), "rb"), &std::fclose
  );
  WEFT_CHECK(context, file != nullptr, ErrorCode::kFile, "read: {}", errno_text(path, errno));
  std::vector<std::byte> text;
  constexpr size_t kChunk = size_t{1} << 20;
  size_t got = kChunk;
  while (got == kChunk) {
    const size_t before = text.size();
    text.resize(before + kChunk);
    got = std::fread(text.data() + before, 1, kChunk, file.get());
    text.resize(before + got);
  }
  WEFT_CHECK(
      context, std::ferror(file.get()) == 0, ErrorCode::kFile, "read: {}", errno_text(path, errno)
  );
  WEFT_CHECK(
      context,
      text.size() > static_cast<size_t>(window),
      ErrorCode::kFile,
      "read: {} holds {} B (more than the window of {} B)",
      path,
      text.size(),
      window
  );
  return text;
}

}  // namespace weft::moe
