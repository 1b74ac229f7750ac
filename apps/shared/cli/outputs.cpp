// SPDX-License-Identifier: Apache-2.0
#include "cli/outputs.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <filesystem>

#include "core/atomic_file.hpp"

namespace weft::program {
namespace {

// Of a device or a pipe there is nothing to lose.
bool is_special(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_other(std::filesystem::status(path, ignored));
}

bool is_same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  if (std::filesystem::equivalent(a, b, error)) {
    return true;
  }
  const auto full_a = std::filesystem::weakly_canonical(a, error);
  return !error && full_a == std::filesystem::weakly_canonical(b, error) && !error;
}

void refuse_same_file(const NamedPath& output, const NamedPath& other) {
  if (!other.path.empty() && !is_special(output.path) && is_same_file(output.path, other.path)) {
    throw CLI::ValidationError(
        fmt::format("{} would replace {} of {}", output.option, output.path, other.option)
    );
  }
}

}  // namespace

void check_outputs(
    std::initializer_list<NamedPath> outputs, std::initializer_list<NamedPath> inputs
) {
  for (const NamedPath& output : outputs) {
    if (output.path.empty()) {
      continue;
    }
    for (const NamedPath& input : inputs) {
      refuse_same_file(output, input);
    }
    for (const NamedPath* other = outputs.begin(); other != &output; ++other) {
      refuse_same_file(output, *other);
    }
    check_writable(output.path);
  }
}

}  // namespace weft::program
