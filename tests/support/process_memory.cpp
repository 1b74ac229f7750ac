// SPDX-License-Identifier: Apache-2.0
#include "support/process_memory.hpp"

#include <filesystem>
#include <fstream>
#include <string>
#include <unistd.h>

namespace weft::test {

ProcessMemory measure_process_memory() {
  ProcessMemory memory;
  std::ifstream statm("/proc/self/statm");
  int64_t total_pages = 0;
  int64_t resident_pages = 0;
  statm >> total_pages >> resident_pages;
  memory.resident_bytes = resident_pages * ::sysconf(_SC_PAGESIZE);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    ++memory.num_mappings;
    memory.num_shared_mappings += line.find("memfd:weft") != std::string::npos ? 1 : 0;
  }
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    static_cast<void>(entry);
    ++memory.num_descriptors;
  }
  return memory;
}

}  // namespace weft::test
