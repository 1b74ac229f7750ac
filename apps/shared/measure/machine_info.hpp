// SPDX-License-Identifier: Apache-2.0
// What this machine has, as the operating system tells it. An unknown number is 0, an unknown text
// empty.
#pragma once

#include <cstdint>
#include <string>

namespace weft::program {

struct MachineInfo {
  std::string host;
  std::string system;  // "Debian GNU/Linux 12 (bookworm), Linux 6.1.0 x86_64"
  std::string cpu;     // model name
  int usable_cores = 0;
  int online_cores = 0;
  int64_t l1d_bytes = 0;  // of one core
  int64_t l2_bytes = 0;
  int64_t l3_bytes = 0;
  int64_t memory_bytes = 0;
  int64_t available_bytes = 0;
  int64_t memory_limit_bytes = 0;  // of this control group, 0: none
  int64_t page_bytes = 0;
  int64_t huge_page_bytes = 0;
  int64_t huge_pages_free = 0;
  std::string shared_huge_pages;  // "never", "advise", ... for shared memory
  int64_t dev_shm_bytes = 0;      // not used by Weft, whose memory has no name
  int64_t open_files_limit = 0;
};

[[nodiscard]] MachineInfo machine_info();

// The word in brackets of a kernel choice such as "always [never] advise"; empty if there is none.
[[nodiscard]] std::string bracketed(const std::string& choices);

}  // namespace weft::program
