// SPDX-License-Identifier: Apache-2.0
// Kernels that use a table of peer memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/hd.hpp"

namespace weft::test {

// Word i that `writer` leaves in memory of `owner`.
[[nodiscard]] WEFT_HD constexpr uint32_t pattern_word(int writer, int owner, uint32_t i) {
  return static_cast<uint32_t>(writer * 64 + owner + 1) * 0x9E3779B1U + i;
}

struct PatternPlace {
  std::byte* const* table = nullptr;      // PeerMemory::table()
  std::byte* const* new_table = nullptr;  // PeerMemory::new_table()
  int owner = 0;
  uint32_t region = 0;
  uint64_t offset = 0;
  uint32_t num_words = 0;
};

// Stores `writer`'s words at the place.
void write_pattern(const PatternPlace& place, int writer, cudaStream_t stream);
// Adds to *num_wrong (device memory) the words there that are not `writer`'s.
void check_pattern(const PatternPlace& place, int writer, uint32_t* num_wrong, cudaStream_t stream);
// One thread that spins until *flag (pinned host memory) is not 0, at most `at_most_ns`.
void spin_on_flag(const uint32_t* flag, uint64_t at_most_ns, cudaStream_t stream);

}  // namespace weft::test
