// SPDX-License-Identifier: Apache-2.0
#include "support/errors.hpp"

namespace weft::test {

std::optional<Thrown> thrown_by(const std::function<void()>& action) {
  try {
    action();
    return std::nullopt;
  } catch (const Error& error) {
    const std::string text = error.what();
    return Thrown{
        .code = error.code(),
        .is_timeout = dynamic_cast<const TimeoutError*>(&error) != nullptr,
        .is_peer_error = dynamic_cast<const PeerError*>(&error) != nullptr,
        .text = text.substr(0, text.rfind(" at "))};
  }
}

std::string text_of(const std::optional<Thrown>& thrown) {
  return thrown ? thrown->text : "nothing";
}

}  // namespace weft::test
