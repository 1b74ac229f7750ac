// SPDX-License-Identifier: Apache-2.0
// Files that a command writes when its work is done, looked at before the work.
#pragma once

#include <initializer_list>
#include <string>

namespace weft::program {

struct NamedPath {
  const char* option;
  const std::string& path;  // empty: not asked for
};

// Throws CLI::ValidationError where an output is an input or another output, Error (kFile) naming a
// path that could not be written.
void check_outputs(
    std::initializer_list<NamedPath> outputs, std::initializer_list<NamedPath> inputs = {}
);

}  // namespace weft::program
