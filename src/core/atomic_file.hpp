// SPDX-License-Identifier: Apache-2.0
// Files that are either the old one or the new one, whole, whenever the process or the machine
// stops.
#pragma once

#include <string>
#include <string_view>

namespace weft {

// Writes a file next to `path`, flushes it to the disk and renames it. Throws Error (kFile) naming
// the path; then the old file is untouched and nothing is left next to it.
void write_file_atomically(const std::string& path, std::string_view bytes);

// Throws Error (kFile) naming the path.
[[nodiscard]] std::string read_whole_file(const std::string& path);

}  // namespace weft
