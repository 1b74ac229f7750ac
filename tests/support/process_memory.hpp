// SPDX-License-Identifier: Apache-2.0
// Memory and descriptors that the system holds for this process.
#pragma once

#include <cstdint>

namespace weft::test {

struct ProcessMemory {
  int64_t resident_bytes = 0;
  int64_t num_mappings = 0;
  int64_t num_shared_mappings = 0;  // of memory that ranks share
  int64_t num_descriptors = 0;
};

[[nodiscard]] ProcessMemory measure_process_memory();

// True where the sanitizers' own memory hides the program's.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kIsSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kIsSanitized = true;
#else
inline constexpr bool kIsSanitized = false;
#endif
#else
inline constexpr bool kIsSanitized = false;
#endif

}  // namespace weft::test
