// SPDX-License-Identifier: Apache-2.0
// Maps memory so that large pages can back it: rows lie in arbitrary places, and with small pages
// address translation costs half the reading speed (two threads summing random 4 KiB rows, Xeon
// at 2.3 GHz in a virtual machine, 2026-11-20: 10 GB/s each with 4 KiB pages, 21 GB/s with 2 MiB
// pages).
#pragma once

#include <cstddef>
#include <cstdint>

#include "weft/error.hpp"

namespace weft {

// Maps `bytes` of `fd` (shared), or of fresh private memory if fd is -1, readable and writable.
// Spans of 2 MiB and more begin on a 2 MiB boundary and ask for large pages. Free it with
// munmap(data, bytes). Throws Error with `code`.
[[nodiscard]] std::byte* map_pages(int fd, uint64_t bytes, ErrorCode code);

// Makes every page present and writable now, so that a shortage is an error here and no SIGBUS at a
// later store. False: the kernel is too old to say (before 5.14). Throws Error (kOutOfMemory).
bool populate_pages(std::byte* data, uint64_t bytes);

}  // namespace weft
