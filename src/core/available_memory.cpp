// SPDX-License-Identifier: Apache-2.0
#include "core/available_memory.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "core/check.hpp"

namespace weft {
namespace {

// Reads a file without streams: a program that holds a second C++ library, as extensions of Python
// may bring one, can leave a stream without the locale that it reads numbers and lines by.
std::string text_of(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(
      std::fopen(path.c_str(), "re"), &std::fclose
  );
  std::string text;
  std::array<char, 4096> part;
  while (const size_t count = file == nullptr ? 0 : std::fread(part.data(), 1, 4096, file.get())) {
    text.append(part.data(), count);
  }
  return text;
}

// Returns the number that `text` begins with after blanks; "max" is none.
uint64_t number_in(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\n"), text.size()));
  uint64_t number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() ? number : kUnknownBytes;
}

// Returns the number behind `name` in a file of "name number" lines.
uint64_t field(const std::string& path, std::string_view name) {
  const std::string text = fmt::format("\n{}", text_of(path));
  const size_t at = text.find(fmt::format("\n{} ", name));
  return at == std::string::npos ? kUnknownBytes
                                 : number_in(std::string_view(text).substr(at + name.size() + 1));
}

uint64_t number_or(uint64_t otherwise, uint64_t number) {
  return number == kUnknownBytes ? otherwise : number;
}

// How a version of control groups calls its files.
struct GroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* cache;  // what of the usage can be given back, in memory.stat
};
constexpr GroupFiles kVersion1 = {
    "/sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file"};
constexpr GroupFiles kVersion2 = {
    "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};

// Bounds memory by `group` and by each group that it lies in.
void bound_by_group(
    const std::string& root, const GroupFiles& files, std::filesystem::path group, MemoryBounds& out
) {
  for (;; group = group.parent_path()) {
    const std::string folder = root + files.mount + group.native() + "/";
    const uint64_t limit = number_in(text_of(folder + files.limit));
    const uint64_t usage = number_or(0, number_in(text_of(folder + files.usage)));
    const uint64_t cache = number_or(0, field(folder + "memory.stat", files.cache));
    const uint64_t used = usage - std::min(usage, cache);
    if (limit != kUnknownBytes) {
      out.limit = std::min(out.limit, limit);
      out.available = std::min(out.available, limit - std::min(limit, used));
    }
    if (group.empty() || group == "/") {
      return;
    }
  }
}

}  // namespace

MemoryBounds memory_bounds(const std::string& root) {
  MemoryBounds bounds;
  const uint64_t system_kib = field(root + "/proc/meminfo", "MemAvailable:");
  bounds.available = system_kib == kUnknownBytes ? kUnknownBytes : system_kib << 10;
  // "0::/path" is version 2, "5:cpu,memory:/path" version 1.
  const std::string groups = text_of(root + "/proc/self/cgroup");
  for (size_t begin = 0, end = 0; begin < groups.size(); begin = end + 1) {
    end = std::min(groups.find('\n', begin), groups.size());
    const std::string line = groups.substr(begin, end - begin);
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const bool is_version_1 = controllers.find(",memory,") != std::string::npos;
    if (is_version_1 || controllers == ",,") {
      bound_by_group(root, is_version_1 ? kVersion1 : kVersion2, line.substr(second + 1), bounds);
    }
  }
  return bounds;
}

void check_available(uint64_t bytes, std::string_view what) {
  const MemoryBounds bounds = memory_bounds();
  WEFT_CHECK(
      Context{},
      bytes <= bounds.available,
      ErrorCode::kOutOfMemory,
      "allocate: no room for {} B of {} ({} B available)",
      bytes,
      what,
      bounds.available
  );
}

}  // namespace weft
