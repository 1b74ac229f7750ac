// SPDX-License-Identifier: Apache-2.0
#include "measure/machine_info.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <fstream>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "measure/measure.hpp"

namespace weft::program {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The text after the first `name` and its separator in a file of "name: value" or name="value".
std::string field(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.starts_with(name)) {
      const size_t start = line.find_first_not_of(" \t:=\"", name.size());
      const size_t end = line.find_last_not_of(" \t\"");
      return start == std::string::npos ? "" : line.substr(start, end - start + 1);
    }
  }
  return {};
}

// "kB" fields of /proc/meminfo count 1024 bytes.
int64_t memory_field(const std::string& name) {
  const std::string text = field("/proc/meminfo", name + ":");
  const int64_t value = std::strtoll(text.c_str(), nullptr, 10);
  return text.ends_with("kB") ? value * 1024 : value;
}

// "48K", "260M"
int64_t size_of(const std::string& text) {
  char* unit = nullptr;
  const int64_t value = std::strtoll(text.c_str(), &unit, 10);
  return value * (*unit == 'K' ? 1024 : *unit == 'M' ? 1024 * 1024 : 1);
}

void read_caches(MachineInfo& info) {
  for (int i = 0; i < 8; ++i) {
    const std::string folder = fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/", i);
    const std::string level = first_line(folder + "level");
    const int64_t bytes = size_of(first_line(folder + "size"));
    if (level == "1" && first_line(folder + "type") == "Data") {
      info.l1d_bytes = bytes;
    } else if (level == "2") {
      info.l2_bytes = bytes;
    } else if (level == "3") {
      info.l3_bytes = bytes;
    }
  }
}

void read_system(MachineInfo& info) {
  utsname names = {};
  uname(&names);
  info.host = names.nodename;
  const std::string product = field("/etc/os-release", "PRETTY_NAME");
  info.system = fmt::format(
      "{}{}{} {} {}",
      product,
      product.empty() ? "" : ", ",
      names.sysname,
      names.release,
      names.machine
  );
  info.cpu = field("/proc/cpuinfo", "model name");
  info.usable_cores = num_usable_cores();
  info.online_cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

void read_memory(MachineInfo& info) {
  info.memory_bytes = memory_field("MemTotal");
  info.available_bytes = memory_field("MemAvailable");
  info.memory_limit_bytes = size_of(first_line("/sys/fs/cgroup/memory.max"));  // "max" reads as 0
  info.page_bytes = sysconf(_SC_PAGESIZE);
  info.huge_page_bytes = memory_field("Hugepagesize");
  info.huge_pages_free = memory_field("HugePages_Free");
  info.shared_huge_pages =
      bracketed(first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled"));
  struct statvfs shm = {};
  if (statvfs("/dev/shm", &shm) == 0) {
    info.dev_shm_bytes = static_cast<int64_t>(shm.f_bavail * shm.f_frsize);
  }
}

}  // namespace

std::string bracketed(const std::string& choices) {
  const size_t open = choices.find('[');
  const size_t close = choices.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) {
    return {};
  }
  return choices.substr(open + 1, close - open - 1);
}

MachineInfo machine_info() {
  MachineInfo info;
  read_system(info);
  read_caches(info);
  read_memory(info);
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    info.open_files_limit = static_cast<int64_t>(files.rlim_cur);
  }
  return info;
}

}  // namespace weft::program
