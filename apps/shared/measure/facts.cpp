// SPDX-License-Identifier: Apache-2.0
#include "measure/facts.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <fstream>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "commit.hpp"
#include "core/available_memory.hpp"
#include "core/gpu/devices.hpp"
#include "cpu/combine/row_sum.hpp"
#include "measure/measure.hpp"
#include "report/table.hpp"
#include "weft/plan.hpp"
#include "weft/routing.hpp"
#include "weft/version.hpp"

namespace weft::program {
namespace {

using Json = nlohmann::ordered_json;

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

// The size of one core's cache; `kind` is named as by the kernel.
int64_t cache_bytes(const std::string& level, const std::string& kind) {
  for (int i = 0; i < 8; ++i) {
    const std::string folder = fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/", i);
    if (first_line(folder + "level") == level && first_line(folder + "type") == kind) {
      return size_of(first_line(folder + "size"));
    }
  }
  return 0;
}

std::string system_text(const utsname& names) {
  const std::string product = field("/etc/os-release", "PRETTY_NAME");
  const char* comma = product.empty() ? "" : ", ";
  return fmt::format("{}{}{} {} {}", product, comma, names.sysname, names.release, names.machine);
}

// The word in brackets of a kernel choice such as "always [never] advise"; empty if there is none.
std::string bracketed(const std::string& choices) {
  const size_t open = choices.find('[');
  const size_t close = choices.find(']', open);
  return close == std::string::npos ? "" : choices.substr(open + 1, close - open - 1);
}

std::string compiler() {
#ifdef __clang__
  return fmt::format("Clang {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#else
  return fmt::format("GCC {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#endif
}

#ifdef WEFT_ENABLE_ASSERT
constexpr bool kHasAsserts = true;
#else
constexpr bool kHasAsserts = false;
#endif

}  // namespace

Json build_info() {
  Json json = {
      {"version", version()},
      {"commit", text_or(WEFT_COMMIT, "unknown")},
      {"dirty", WEFT_DIRTY},
      {"compiler", compiler()},
      {"build_type", WEFT_BUILD_TYPE},
      {"sanitizers", text_or(WEFT_SANITIZERS, "none")},
      {"assertions", kHasAsserts},
      {"executors", Json::array({"cpu"})},
      {"layouts", Json::array()},
      {"dispatch_dtypes", Json::array()},
      {"combine_dtypes", Json::array()},
      {"max_topk", kMaxTopk},
      {"simd", row_sum_target()}};
  if (!list_gpus().runtime.empty()) {
    json["executors"].push_back("cuda");
  }
  for (const auto layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
    json["layouts"].push_back(layout_name(layout));
  }
  for (const auto dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    json["dispatch_dtypes"].push_back(dtype_name(dtype));
    json["combine_dtypes"].push_back(dtype_name(dtype));
  }
  json["dispatch_dtypes"].push_back(dtype_name(DType::kByte));
  return json;
}

Json machine_info() {
  utsname names = {};
  uname(&names);
  struct statvfs shm = {};
  static_cast<void>(statvfs("/dev/shm", &shm));
  const int64_t memory = memory_field("MemTotal");
  const MemoryBounds bounds = memory_bounds();
  // Limit of this control group; one above the memory that there is bounds nothing.
  const int64_t limit =
      bounds.limit < static_cast<uint64_t>(memory) ? static_cast<int64_t>(bounds.limit) : 0;
  rlimit files = {};
  static_cast<void>(getrlimit(RLIMIT_NOFILE, &files));
  return {
      {"host", names.nodename},
      {"system", system_text(names)},
      {"cpu", field("/proc/cpuinfo", "model name")},
      {"usable_cores", num_usable_cores()},
      {"online_cores", sysconf(_SC_NPROCESSORS_ONLN)},
      {"l1d_bytes", cache_bytes("1", "Data")},
      {"l2_bytes", cache_bytes("2", "Unified")},
      {"l3_bytes", cache_bytes("3", "Unified")},
      {"memory_bytes", memory},
      {"available_bytes", static_cast<int64_t>(bounds.available)},
      {"memory_limit_bytes", limit},
      {"page_bytes", sysconf(_SC_PAGESIZE)},
      {"huge_page_bytes", memory_field("Hugepagesize")},
      {"huge_pages_free", memory_field("HugePages_Free")},
      {"shared_huge_pages",
       bracketed(first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))},
      // Not used by Weft, whose memory has no name.
      {"dev_shm_bytes", static_cast<int64_t>(shm.f_bavail * shm.f_frsize)},
      {"open_files_limit", static_cast<int64_t>(files.rlim_cur)}};
}

}  // namespace weft::program
