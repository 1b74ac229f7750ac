// SPDX-License-Identifier: Apache-2.0
// What is known about the program since it was built.
#pragma once

#include <string>
#include <vector>

namespace weft::program {

struct BuildInfo {
  std::string version;
  std::string commit;  // empty if it was not built from a git checkout
  bool is_dirty = false;
  std::string compiler;    // "GCC 12.2.0"
  std::string build_type;  // "RelWithDebInfo"
  std::string sanitizers;  // empty: none
  bool has_asserts = false;
  std::vector<std::string> executors;
};

[[nodiscard]] BuildInfo build_info();

}  // namespace weft::program
