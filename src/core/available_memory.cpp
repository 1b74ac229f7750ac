// SPDX-License-Identifier: Apache-2.0
#include "core/available_memory.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "core/check.hpp"

namespace weft {
namespace {

// The number behind `name` in a file of "name number" lines.
uint64_t field(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    uint64_t number = 0;
    if (word == name && file >> number) {
      return number;
    }
  }
  return kUnknownBytes;
}

// A file of one number; "max" is none.
uint64_t number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  return file >> number ? number : kUnknownBytes;
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

// Of the group and all that it lies in: each bounds it.
void bound_by_group(
    const std::string& root, const GroupFiles& files, std::filesystem::path group, MemoryBounds& out
) {
  for (;; group = group.parent_path()) {
    const std::string folder = root + files.mount + group.native() + "/";
    const uint64_t limit = number_in(folder + files.limit);
    const uint64_t usage = number_or(0, number_in(folder + files.usage));
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
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
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
