// SPDX-License-Identifier: Apache-2.0
// Why a rank refuses a call, on its way to the other ranks.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "weft/error.hpp"

namespace weft {

// Trivially copyable; lies in shared memory. What is longer is cut.
struct RefusalText {
  RefusalText() = default;
  explicit RefusalText(std::string_view reason) {
    reason.copy(chars.data(), std::min(reason.size(), chars.size() - 1));
  }
  [[nodiscard]] std::string_view view() const {
    return {chars.data(), static_cast<size_t>(std::ranges::find(chars, '\0') - chars.begin())};
  }

  std::array<char, 512> chars = {};
};

// The error of a rank whose refusal could not be told, as its stream is being captured.
[[nodiscard]] inline Error untold(const Error& error) {
  std::string text = error.what();
  const std::string note = " (the call was being captured: no other rank hears of it)";
  text.insert(std::min(text.rfind(" at "), text.size()), note);  // before the place in the source
  return {error.code(), text, error.rank(), error.where()};
}

}  // namespace weft
