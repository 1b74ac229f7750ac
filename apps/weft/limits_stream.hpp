// SPDX-License-Identifier: Apache-2.0
// A row copy by streaming stores, for the widest vectors of this machine.
#pragma once

#include <cstddef>

namespace weft::program {

// `bytes` and both pointers are multiples of 16.
void copy_streaming(std::byte* to, const std::byte* from, size_t bytes);
// Makes earlier streaming stores of this thread visible; once after many rows.
void flush_streaming();

}  // namespace weft::program
