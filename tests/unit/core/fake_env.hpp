// SPDX-License-Identifier: Apache-2.0
// An environment of a test's own.
#pragma once

#include <map>
#include <string>

#include "core/env.hpp"

namespace weft {

using Variables = std::map<std::string, std::string>;

inline Env env_of(const Variables& variables) {
  return Env::read([&](const std::string& name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

}  // namespace weft
