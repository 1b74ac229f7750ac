// SPDX-License-Identifier: Apache-2.0
// Text of what an action throws, which a test can compare.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "weft/error.hpp"

namespace weft::test {

struct Thrown {
  ErrorCode code = ErrorCode::kInternal;
  bool is_timeout = false;
  bool is_peer_error = false;
  std::string text;  // up to " at file:line"
};

// Empty if nothing is thrown. Anything but an Error passes through.
[[nodiscard]] std::optional<Thrown> thrown_by(const std::function<void()>& action);

// Its text, or "nothing".
[[nodiscard]] std::string text_of(const std::optional<Thrown>& thrown);

}  // namespace weft::test
